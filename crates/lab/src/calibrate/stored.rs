//! Where calibrations are kept, and which of them is of a run's own model, engine and device.

use crate::LabError;
use crate::dataset::hex;
use crate::metering::Metering;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use wattle_core::calibration::{CALIBRATION_VERSION, Calibration, Subject};
use wattle_core::sensor::Device;
use wattle_core::spec::Spec;
use wattle_core::summary::{ModelInfo, slug};
use wattle_store::write_json;

/// Names the folder.
const VARIABLE: &str = "WATTLE_CALIBRATIONS";
/// A less thorough calibration takes the place of a better one if it is so many days newer: drivers and engines change.
const DAYS: i64 = 30;
/// As long as it takes to tell subjects apart.
const DIGITS: usize = 12;

/// What a run of this model with these sensors is of; `None` without energy.
pub(crate) fn subject(model: &ModelInfo, metering: &Metering) -> Option<Subject> {
    let panel = metering.panel.as_ref()?;
    let sensors = metering.sensors();
    let mut devices: Vec<Device> =
        panel.sensors.iter().map(|id| sensors[usize::from(id.0)].device.clone()).collect();
    devices.sort_by(|a, b| a.id.cmp(&b.id));
    Some(Subject {
        model: model.name.clone(),
        sha256: model.sha256.clone(),
        format: model.format.clone(),
        engine: model.engine.clone(),
        devices,
        perimeter: panel.perimeter,
    })
}

/// SHA-256 of a subject.
pub(super) fn digest(subject: &Subject) -> String {
    // A struct of plain fields is always written in their order.
    hex(&Sha256::digest(serde_json::to_vec(subject).unwrap_or_default()))
}

/// The folder of calibrations: `$WATTLE_CALIBRATIONS`, else `wattle/calibrations` where this user's programs keep their data.
pub fn folder() -> Option<PathBuf> {
    let path = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let data =
        || path("XDG_DATA_HOME").filter(|p| p.is_absolute()).or(Some(path("HOME")?.join(".local/share")));
    path(VARIABLE).or_else(|| Some(data()?.join("wattle/calibrations")))
}

/// What is in a folder of calibrations.
#[derive(Debug, Default)]
pub struct Shelf {
    /// What can be read, newest first.
    pub found: Vec<(PathBuf, Calibration)>,
    /// What is passed over, and why.
    pub skipped: Vec<(PathBuf, LabError)>,
}

/// Every calibration in a folder.
pub fn list(folder: &Path) -> Shelf {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let mut shelf = Shelf::default();
    for path in entries.filter(|p| p.extension().is_some_and(|e| e == "json")) {
        match read(&path) {
            Ok(calibration) => shelf.found.push((path, calibration)),
            Err(why) => shelf.skipped.push((path, why)),
        }
    }
    shelf.found.sort_by(|(x, a), (y, b)| (&b.created, x).cmp(&(&a.created, y)));
    shelf.skipped.sort_by(|(x, _), (y, _)| x.cmp(y));
    shelf
}

/// The calibration of a subject that runs use: the most thorough one, and the newest of these, unless another is 30 days newer.
pub fn find(subject: &Subject) -> Option<Calibration> {
    found(subject).map(|(_, calibration)| calibration)
}

/// The same, with where it is.
pub(super) fn found(subject: &Subject) -> Option<(PathBuf, Calibration)> {
    let digest = digest(subject);
    let mut all = list(&folder()?).found;
    all.retain(|(_, c)| c.digest == digest && c.subject == *subject);
    best(all)
}

/// The most thorough of those that are not much older than the newest; these come newest first.
fn best(all: Vec<(PathBuf, Calibration)>) -> Option<(PathBuf, Calibration)> {
    let newest = days(&all.first()?.1.created);
    let fresh = all.into_iter().filter(|(_, c)| newest - days(&c.created) < DAYS);
    fresh.reduce(|best, other| if other.1.level > best.1.level { other } else { best })
}

/// Days to a date of RFC 3339 (the Julian day number less a constant); 0 of what is none.
fn days(date: &str) -> i64 {
    let number = |at: std::ops::Range<usize>| date.get(at).and_then(|t| t.parse::<i64>().ok());
    let Some(((year, month), day)) = number(0..4).zip(number(5..7)).zip(number(8..10)) else { return 0 };
    // Years that begin in March have their leap day at the end.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day
}

/// Reads a calibration file.
pub fn read(path: &Path) -> Result<Calibration, LabError> {
    let wrong = |why: String| LabError::Usage(format!("{}: {why}", path.display()));
    let text = std::fs::read(path).map_err(|e| wrong(format!("cannot be read: {e}")))?;
    let none =
        |e: serde_json::Error| wrong(format!("is no calibration ({e}); make one with \"wattle calibrate\""));
    let version: Version = serde_json::from_slice(&text).map_err(none)?;
    match version.calibration_version {
        CALIBRATION_VERSION => serde_json::from_slice(&text).map_err(none),
        other => Err(wrong(format!(
            "is a calibration of version {other}, and this wattle reads version {CALIBRATION_VERSION}; calibrate again"
        ))),
    }
}

#[derive(serde::Deserialize)]
struct Version {
    calibration_version: u32,
}

/// The calibration that `--calibration` means for a subject: `auto`, `none`, or a file, which must be of it.
pub(crate) fn chosen(asked: &str, subject: &Subject) -> Result<Option<Calibration>, LabError> {
    match asked {
        "none" => Ok(None),
        "auto" => Ok(find(subject)),
        file => {
            let calibration = read(Path::new(file))?;
            match calibration.subject.difference(subject) {
                None => Ok(Some(calibration)),
                Some((what, then, now)) => Err(LabError::Usage(format!(
                    "{file} is a calibration of something else: its {what} is {then}, and that of this run is {now}; calibrate this one, or leave out --calibration"
                ))),
            }
        }
    }
}

/// The call that calibrates what a run of `spec` asks.
pub(crate) fn command(spec: &Spec, model: &str) -> String {
    let mut words = vec!["wattle".to_owned(), "calibrate".into(), "--client".into(), spec.client.clone()];
    let mut add = |flag: &str, value: String| words.extend([format!("--{flag}"), value]);
    spec.url.iter().for_each(|url| add("url", url.clone()));
    add("model", spec.model.clone().unwrap_or_else(|| model.to_owned()));
    for (flag, params) in
        [("client-param", &spec.client_param), ("server", &spec.server), ("source-param", &spec.source_param)]
    {
        params.iter().for_each(|(key, value)| add(flag, format!("{key}={value}")));
    }
    spec.source.iter().for_each(|source| add("source", source.clone()));
    spec.root.iter().for_each(|root| add("root", root.clone()));
    let quoted = words.iter().map(|w| shlex::try_quote(w).map_or_else(|_| w.clone(), |q| q.into_owned()));
    quoted.collect::<Vec<_>>().join(" ")
}

/// Whether there will be a place for the result, which is better known before than after.
pub(super) fn check(out: Option<&Path>) -> Result<(), LabError> {
    let folder = place(out)?.0;
    let probe = folder.join(format!(".wattle-{}", std::process::id()));
    let written = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&probe, ""));
    written.and_then(|()| std::fs::remove_file(&probe)).map_err(|e| {
        LabError::Calibrate(format!(
            "cannot keep a calibration in {}: {e}; name another folder with --out or {VARIABLE}",
            folder.display()
        ))
    })
}

/// Keeps it: in the usual folder, in another one, or as a file. What cannot be read again is not kept, and takes the place of nothing.
pub(super) fn save(calibration: &Calibration, out: Option<&Path>) -> Result<PathBuf, LabError> {
    let (folder, file) = place(out)?;
    let usual = || {
        let digest = &calibration.digest[..DIGITS.min(calibration.digest.len())];
        // A quick one beside a thorough one, not instead of it.
        let level = calibration.level.name();
        format!("{}_{digest}_{level}.json", slug(&calibration.subject.model, 60)).into()
    };
    let path = folder.join(file.unwrap_or_else(usual));
    let text = serde_json::to_vec(calibration).unwrap_or_default();
    serde_json::from_slice::<Calibration>(&text).map_err(|e| {
        LabError::Calibrate(format!(
            "the calibration has a figure that no file can keep ({e}), so it was not kept; see how the sensors are with \"wattle doctor\", and calibrate again"
        ))
    })?;
    write_json(path.clone(), calibration)?;
    read(&path)?;
    Ok(path)
}

/// A folder, and the name of the file, if it was given.
fn place(out: Option<&Path>) -> Result<(PathBuf, Option<PathBuf>), LabError> {
    match out {
        Some(file) if file.extension().is_some_and(|e| e == "json") && !file.is_dir() => {
            let name = file.file_name().map(PathBuf::from);
            let parent = file.parent().filter(|p| !p.as_os_str().is_empty());
            Ok((parent.unwrap_or(Path::new(".")).to_owned(), name))
        }
        Some(folder) => Ok((folder.to_owned(), None)),
        None => folder().map(|folder| (folder, None)).ok_or_else(|| {
            LabError::Usage(format!(
                "there is no home folder to keep calibrations in; name one with --out or {VARIABLE}"
            ))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wattle_core::calibration::{Effort, Ladder, Quality};
    use wattle_core::cost::Cost;
    use wattle_core::estimate::Method;
    use wattle_core::sensor::Perimeter;
    use wattle_core::{Estimate, Watts};

    #[test]
    fn the_call_that_calibrates_has_the_flags_of_the_run() {
        let mut spec =
            Spec { client: "openai".into(), url: Some("http://127.0.0.1:1/v1".into()), ..Spec::default() };
        spec.source = vec!["nvml".into()];
        spec.client_param.insert("body".into(), r#"{"top_p":0.9}"#.into());
        assert_eq!(
            command(&spec, "org/model"),
            r#"wattle calibrate --client openai --url http://127.0.0.1:1/v1 --model org/model --client-param 'body={"top_p":0.9}' --source nvml"#
        );
    }

    #[test]
    fn a_result_goes_to_a_file_or_a_folder() {
        let place = |text: &str| place(Some(Path::new(text))).unwrap();
        assert_eq!(place("a/b.json"), ("a".into(), Some("b.json".into())));
        assert_eq!(place("b.json"), (".".into(), Some("b.json".into())));
        assert_eq!(place("a/b"), ("a/b".into(), None));
    }

    #[test]
    fn what_is_no_calibration_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        std::fs::write(&path, "{}").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("is no calibration"));
        std::fs::write(&path, r#"{"calibration_version": 99}"#).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("version 99"));
        let shelf = list(dir.path());
        assert!(shelf.found.is_empty() && shelf.skipped.len() == 1);
        assert!(shelf.skipped[0].1.to_string().contains("calibrate again"), "{shelf:?}");
        assert!(list(&dir.path().join("nowhere")).skipped.is_empty());
    }

    fn made(level: Effort, created: &str) -> Calibration {
        let cost = Cost { fixed: 1.5, prefill: 0.5, decode: 0.25, context: 0.125 };
        Calibration {
            calibration_version: CALIBRATION_VERSION,
            digest: "22".repeat(32),
            subject: Subject {
                model: "made-up".into(),
                sha256: None,
                format: None,
                engine: None,
                devices: Vec::new(),
                perimeter: Perimeter::Device,
            },
            created: created.into(),
            version: "0.1.0".into(),
            level,
            seed: 1,
            duration_s: 1.5,
            joules: cost,
            bound: cost,
            covariance: [[0.5; 4]; 4],
            gain: 0.5,
            seconds: cost,
            idle_w: Estimate::new(Watts(1.5), Watts(0.5), Method::Counter, 1.0),
            quality: Quality {
                cells: 1,
                repeats: 1,
                r2: 0.5,
                condition: 1.5,
                widened: 1.5,
                residuals: [(Ladder::Prefill, 0.5)].into(),
                seconds_r2: 0.5,
                seconds_residuals: [(Ladder::Prefill, 0.5)].into(),
            },
            warnings: Vec::new(),
            cells: Vec::new(),
        }
    }

    #[test]
    fn what_cannot_be_read_again_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let mut calibration = made(Effort::Quick, "2026-01-01T00:00:00.000Z");
        let good = save(&calibration, Some(dir.path())).unwrap();
        calibration.quality.residuals.insert(Ladder::Decode, f64::INFINITY);
        let error = save(&calibration, Some(dir.path())).unwrap_err().to_string();
        assert!(error.contains("no file can keep"), "{error}");
        assert!(read(&good).is_ok(), "the one before is still there");
    }

    #[test]
    fn a_quick_calibration_does_not_take_the_place_of_a_better_one() {
        let dir = tempfile::tempdir().unwrap();
        let thorough = made(Effort::Thorough, "2026-01-20T00:00:00.000Z");
        save(&thorough, Some(dir.path())).unwrap();
        let chosen = || best(list(dir.path()).found).unwrap().1;
        save(&made(Effort::Quick, "2026-02-18T00:00:00.000Z"), Some(dir.path())).unwrap();
        assert_eq!(chosen(), thorough);
        save(&made(Effort::Quick, "2026-02-19T00:00:00.000Z"), Some(dir.path())).unwrap();
        assert_eq!(chosen().level, Effort::Quick, "30 days are enough");
        save(&made(Effort::Default, "2026-02-10T00:00:00.000Z"), Some(dir.path())).unwrap();
        assert_eq!(chosen().level, Effort::Default);
    }

    #[test]
    fn days_are_counted_over_leap_years() {
        assert_eq!(days("2024-03-01T") - days("2024-02-28T"), 2);
        assert_eq!(days("2026-03-01T") - days("2026-02-28T"), 1);
        assert_eq!(days("2027-01-01T") - days("2026-01-01T"), 365);
    }
}
