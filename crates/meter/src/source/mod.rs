//! Sources: one file each, and two adjacent lines here. Each compiles everywhere and says by itself why it cannot be read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use wattle_core::registry::{self, About, Params, Unknown};
use wattle_core::sensor::{DeviceKind, Reading, Sensor};
use wattle_core::summary::SourceInfo;

mod model;
mod nvml;
pub(crate) mod procstat;
mod rapl;
mod replay;

/// Every source there is, best first.
pub const DRIVERS: &[Driver] = &[nvml::DRIVER, rapl::DRIVER, replay::DRIVER, procstat::DRIVER, model::DRIVER];

/// How a source is found and opened.
pub struct Driver {
    /// Its name, one line, its options.
    pub about: About,
    /// When it is opened unless the user says otherwise.
    pub when: When,
    /// Opens it.
    pub open: fn(&Settings) -> Result<Box<dyn Source>, Unavailable>,
}

/// When a source is opened unless the user says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Always, if it can be.
    Present,
    /// Only if nothing measures energy.
    LastResort,
    /// Only when named.
    Named,
}

/// What a source is opened with.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Its own options.
    pub params: Params,
    /// Where sysfs and procfs are found: `/`, or a folder of pretended hardware.
    pub root: PathBuf,
    /// Opens a recorded run, where the caller can.
    pub recordings: Option<Recordings>,
}

/// Opens the readings of the run in a folder; this crate knows no run folders.
pub type Recordings = fn(&Path) -> Result<Recording, String>;

/// What sensors said before.
pub struct Recording {
    /// They.
    pub sensors: Vec<Sensor>,
    /// What they said, in order; ids are positions in `sensors`.
    pub readings: Box<dyn Iterator<Item = Result<Reading, String>> + Send>,
}

impl Settings {
    /// A path of the system, below the root.
    pub fn path(&self, absolute: &str) -> PathBuf {
        self.root.join(absolute.trim_start_matches('/'))
    }
}

/// Why a source cannot be read, and what would change that.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}; {fix}")]
pub struct Unavailable {
    /// What is missing.
    pub why: String,
    /// What to do about it.
    pub fix: String,
}

impl Unavailable {
    pub(crate) fn new(why: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { why: why.into(), fix: fix.into() }
    }
}

/// How much to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Only what changes fast: energy and power.
    Fast,
    /// Everything: temperature, memory, utilisation too. Asked for a few times a second.
    All,
}

/// Something that is read.
pub trait Source: Send {
    /// What it reads, fixed once opened.
    fn sensors(&self) -> &[Sensor];

    /// Reads now: calls `put` with the position in [`Source::sensors`] and the value, `None` where the read failed. A sensor
    /// that is not due at this depth is left out. Must not allocate or block for long: it runs on the sampler's thread.
    fn read(&mut self, depth: Depth, put: &mut dyn FnMut(usize, Option<f64>));

    /// How often it is worth reading, if that is less often than the sampler's own interval.
    fn interval(&self) -> Option<Duration> {
        None
    }

    /// What else is to be known about it: driver version, place of a board. Kept in `run.json`.
    fn facts(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    /// What is doubtful about it: shown with every result.
    fn doubts(&self) -> Vec<String> {
        Vec::new()
    }

    /// What is pretended about it, if anything: a stand-in library, another root.
    fn pretended(&self) -> Option<String> {
        None
    }
}

/// What the user asked of the sources.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// Names, or empty for all that are there.
    pub names: Vec<String>,
    /// Options, as `source.key`.
    pub params: Params,
    /// Another root than `/`.
    pub root: Option<PathBuf>,
    /// Whether a model may stand in where nothing measures energy.
    pub estimate: bool,
    /// The kind of device that does the work, where it is known: a measurement of others does not keep the model out.
    pub worker: Option<DeviceKind>,
    /// Whether a source that was asked for and is not there is listed rather than an error.
    pub lenient: bool,
    /// Opens a recorded run, where the caller can.
    pub recordings: Option<Recordings>,
    /// Options that a source may have if it is there; unlike `params` they ask for nothing.
    pub hints: Params,
}

/// The sources that could be opened, and what became of all of them.
pub struct Opened {
    /// Ready to be read.
    pub sources: Vec<Box<dyn Source>>,
    /// Every source that was tried.
    pub tried: Vec<SourceInfo>,
    /// What is pretended.
    pub pretended: Vec<String>,
    /// What is doubtful, by source.
    pub doubts: Vec<(String, String)>,
}

/// The option that every source has: how often it is read at most, in milliseconds.
const INTERVAL: &str = "interval_ms";

fn interval(text: &str) -> Option<Duration> {
    let ms = text.parse::<f64>().ok().filter(|ms| (0.5..=3.6e6).contains(ms))?;
    Some(Duration::from_secs_f64(ms * 1e-3))
}

/// A source that the user wants read less often.
struct Paced {
    source: Box<dyn Source>,
    interval: Duration,
}

impl Source for Paced {
    fn sensors(&self) -> &[Sensor] {
        self.source.sensors()
    }

    fn read(&mut self, depth: Depth, put: &mut dyn FnMut(usize, Option<f64>)) {
        self.source.read(depth, put);
    }

    fn doubts(&self) -> Vec<String> {
        self.source.doubts()
    }

    fn interval(&self) -> Option<Duration> {
        Some(self.source.interval().map_or(self.interval, |own| own.max(self.interval)))
    }
}

/// Why sources could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No such source, or no such option.
    #[error(transparent)]
    Unknown(#[from] Unknown),
    /// The user named it, and it is not there.
    #[error("source \"{name}\" cannot be read: {unavailable}")]
    Named {
        /// Its name.
        name: String,
        /// Why, and the way out.
        unavailable: Unavailable,
    },
    /// Not an interval.
    #[error("{0} must be a number of milliseconds between 0.5 and 3600000")]
    Interval(String),
    /// A source option without its source.
    #[error(
        "source option \"{0}\" must be written source.key=value, for example nvml.library=/usr/lib/libnvidia-ml.so.1"
    )]
    Unqualified(String),
}

/// Opens what was asked for, or what there is.
pub fn open(wanted: &Wanted) -> Result<Opened, OpenError> {
    for name in &wanted.names {
        registry::find("source", DRIVERS, |d| d.about, name)?;
    }
    let mut params: Vec<Params> = vec![Params::new(); DRIVERS.len()];
    let mut intervals: Vec<Option<Duration>> = vec![None; DRIVERS.len()];
    for (key, value) in &wanted.params {
        let (name, option) = key.split_once('.').ok_or_else(|| OpenError::Unqualified(key.clone()))?;
        let driver = registry::find("source", DRIVERS, |d| d.about, name)?;
        let at = DRIVERS.iter().position(|d| d.about.name == driver.about.name).unwrap_or_default();
        if option == INTERVAL {
            intervals[at] = Some(interval(value).ok_or_else(|| OpenError::Interval(key.clone()))?);
            continue;
        }
        params[at].insert(option.to_owned(), value.clone());
        driver.about.check("source", &params[at])?;
    }
    let mut opened =
        Opened { sources: Vec::new(), tried: Vec::new(), pretended: Vec::new(), doubts: Vec::new() };
    for ((driver, params), interval) in DRIVERS.iter().zip(params).zip(intervals) {
        let named = wanted.names.iter().any(|n| n == driver.about.name);
        let covers = |s: &Sensor| {
            let kind = s.device.kind;
            wanted.worker.is_none_or(|worker| kind == worker || kind == DeviceKind::Machine)
        };
        let measures =
            opened.sources.iter().flat_map(|s| s.sensors()).any(|s| s.energy_method().is_some() && covers(s));
        // Who gives a source an option means it.
        let meant = named || !params.is_empty();
        let by_default = match driver.when {
            When::Present => true,
            When::LastResort => wanted.estimate && !measures,
            // Naming a file for it is naming it.
            When::Named => !params.is_empty(),
        };
        if !(named || wanted.names.is_empty() && by_default) {
            continue;
        }
        let root = wanted.root.clone().unwrap_or_else(|| "/".into());
        let mut settings = Settings { params, root, recordings: wanted.recordings };
        for (key, value) in &wanted.hints {
            if let Some(option) = key.strip_prefix(driver.about.name).and_then(|k| k.strip_prefix('.')) {
                settings.params.entry(option.to_owned()).or_insert_with(|| value.clone());
            }
        }
        let mut facts = BTreeMap::new();
        let (unavailable, fix) = match open_one(driver, settings) {
            Ok(source) => {
                let name = || driver.about.name.to_owned();
                opened.doubts.extend(source.doubts().into_iter().map(|what| (name(), what)));
                opened.pretended.extend(source.pretended());
                facts = source.facts();
                opened.sources.push(match interval {
                    Some(interval) => Box::new(Paced { source, interval }),
                    None => source,
                });
                (None, None)
            }
            Err(unavailable) if meant && !wanted.lenient => {
                return Err(OpenError::Named { name: driver.about.name.to_owned(), unavailable });
            }
            Err(Unavailable { why, fix }) => (Some(why), Some(fix)),
        };
        opened.tried.push(SourceInfo { name: driver.about.name.to_owned(), unavailable, fix, facts });
    }
    if let Some(root) = wanted.root.as_ref().filter(|r| r.as_os_str() != "/") {
        opened.pretended.push(format!("sysfs and procfs below {}", root.display()));
    }
    Ok(opened)
}

/// A driver that hangs must not hang us: it is opened on a thread of its own, which is left behind if it does not come back.
fn open_one(driver: &'static Driver, settings: Settings) -> Result<Box<dyn Source>, Unavailable> {
    let (send, receive) = std::sync::mpsc::channel();
    let open = move || {
        let _ = send.send((driver.open)(&settings));
    };
    let hangs = || {
        Unavailable::new(
            format!("did not open within {} s: its driver hangs", PATIENCE.as_secs()),
            "mend the driver (for NVIDIA, `nvidia-smi` hangs too), or leave it out by naming others with --source",
        )
    };
    match std::thread::Builder::new().name("wattle-open".into()).spawn(open) {
        Ok(_) => receive.recv_timeout(PATIENCE).unwrap_or_else(|_| Err(hangs())),
        Err(e) => Err(Unavailable::new(format!("cannot start a thread: {e}"), "raise the limit (ulimit -u)")),
    }
}

/// NVML takes up to a few seconds to wake boards up; none takes longer.
const PATIENCE: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_source_or_option_is_told_with_the_nearest() {
        let error = |names: &[&str], key: &str| {
            let params =
                if key.is_empty() { Params::new() } else { Params::from([(key.to_owned(), "x".to_owned())]) };
            let names = names.iter().map(|n| (*n).to_owned()).collect();
            open(&Wanted { names, params, ..Wanted::default() }).err().unwrap().to_string()
        };
        assert!(error(&["nvlm"], "").contains("did you mean \"nvml\"?"));
        assert!(error(&[], "rapl.rot").contains("rapl"));
        assert!(error(&[], "root").contains("source.key=value"));
        assert!(error(&[], "rapl.interval_ms").contains("number of milliseconds"));
    }

    #[test]
    fn every_source_can_be_slowed_down_and_none_sped_up() {
        let opened = |ms: &str| {
            let params = Params::from([("model.interval_ms".to_owned(), ms.to_owned())]);
            let wanted = Wanted { names: vec!["model".into()], params, ..Wanted::default() };
            open(&wanted).unwrap().sources[0].interval()
        };
        assert_eq!(opened("50"), Some(Duration::from_millis(50)));
        let slow = Paced { source: Box::new(Nothing), interval: Duration::from_millis(5) };
        assert_eq!(slow.interval(), Some(Duration::from_secs(1)));
    }

    struct Nothing;

    impl Source for Nothing {
        fn sensors(&self) -> &[Sensor] {
            &[]
        }

        fn read(&mut self, _: Depth, _: &mut dyn FnMut(usize, Option<f64>)) {}

        fn interval(&self) -> Option<Duration> {
            Some(Duration::from_secs(1))
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = DRIVERS.iter().map(|d| d.about.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), DRIVERS.len());
    }
}
