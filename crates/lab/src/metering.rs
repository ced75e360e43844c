//! What a run's energy comes from: decided once, before anything is written, by the spec, the machine and where the work is done.

use crate::LabError;
use crate::client::Place;
use std::path::{Path, PathBuf};
use std::time::Duration;
use wattle_core::calibration::Attribution;
use wattle_core::event::Event;
use wattle_core::qualify::{Qualification, Qualifier};
use wattle_core::sensor::{DeviceKind, Panel, Reading, Sensor, SensorId};
use wattle_core::spec::{Energy, Spec};
use wattle_core::summary::{RunInfo, SourceInfo};
use wattle_core::{Method, Warning};
use wattle_meter::source::{self, Recording, Wanted};
use wattle_meter::{Meter, clock};
use wattle_store::RunDir;

/// How often sensors are looked at while they are qualified.
const LOOK: Duration = Duration::from_millis(20);
/// The slowest counters change every half second, and a ratio takes six changes.
const LONGEST_LOOK_NS: u64 = 3_200_000_000;
/// Where there is nothing to compare, only the period is of interest.
const SHORT_LOOK_NS: u64 = 300_000_000;

/// The running meter, or the reasons why there is none.
pub(crate) struct Metering {
    pub(crate) meter: Option<Meter>,
    pub(crate) panel: Option<Panel>,
    pub(crate) tried: Vec<SourceInfo>,
    pub(crate) qualified: Vec<Qualification>,
    pub(crate) warnings: Vec<Warning>,
    /// What was read while the sensors were qualified.
    pub(crate) early: Vec<Reading>,
    /// What happened before there was a log to write it to.
    pub(crate) happened: Vec<Event>,
    /// By what energy will be split, once that is decided.
    pub(crate) attribution: Option<Attribution>,
    worker: Option<DeviceKind>,
    /// Seconds between reads of the source that is read least often.
    slowest_read_s: f64,
}

impl Metering {
    /// Opens what `spec` asks for and starts reading. `worker` is the kind of device that does the work, where it is known;
    /// `server` the process that was started to do it.
    pub(crate) fn open(
        spec: &Spec,
        place: &Place,
        worker: Option<DeviceKind>,
        server: Option<u32>,
    ) -> Result<Self, LabError> {
        let without = |why: String| Self {
            meter: None,
            panel: None,
            tried: Vec::new(),
            qualified: Vec::new(),
            warnings: vec![Warning::NoEnergy { why }],
            early: Vec::new(),
            happened: Vec::new(),
            attribution: None,
            worker: None,
            slowest_read_s: 0.0,
        };
        match (spec.energy, place) {
            (Energy::None, _) => return Ok(without("--energy none was asked for".into())),
            (mode, Place::Elsewhere { host }) => {
                let why = format!("the model runs on {host}, and this machine's joules are not its joules");
                return match mode {
                    Energy::Measured => Err(LabError::NotMeasurable { why }),
                    _ => Ok(without(why)),
                };
            }
            _ => {}
        }
        // Sensors that the user names are the user's choice.
        let chosen_for = worker.filter(|_| spec.source.is_empty());
        let opened = source::open(&Wanted {
            names: spec.source.clone(),
            params: spec.source_param.clone(),
            root: spec.root.as_ref().map(PathBuf::from),
            estimate: spec.energy == Energy::Auto,
            worker: chosen_for,
            lenient: false,
            recordings: Some(recording),
            hints: tree(spec, server).into_iter().map(|pid| ("procstat.pid".to_owned(), pid)).collect(),
        })?;
        let sensors: Vec<Sensor> = opened.sources.iter().flat_map(|s| s.sensors().iter().cloned()).collect();
        let panel = Panel::choose(&sensors, chosen_for, &[]);
        let measures = |kind: DeviceKind| {
            let chosen = panel.iter().flat_map(|p| &p.sensors).map(|s| &sensors[usize::from(s.0)]);
            chosen.map(|s| s.device.kind).any(|k| k == kind || k == DeviceKind::Machine)
        };
        let why = || {
            let reasons =
                opened.tried.iter().filter_map(|s| Some(format!("{}: {}", s.name, s.unavailable.as_ref()?)));
            let reasons = reasons.collect::<Vec<_>>().join("; ");
            match chosen_for {
                Some(DeviceKind::Cpu) if !reasons.is_empty() => {
                    format!("the model runs on the CPU; {reasons}")
                }
                _ if reasons.is_empty() => "none of the sources asked for measures energy".to_owned(),
                _ => reasons,
            }
        };
        let mut warnings: Vec<Warning> =
            opened.pretended.iter().map(|what| Warning::PretendedHardware { what: what.clone() }).collect();
        warnings.extend(
            opened
                .doubts
                .iter()
                .map(|(source, what)| Warning::Sensor { sensor: source.clone(), what: what.clone() }),
        );
        let modelled = panel.as_ref().is_some_and(|p| {
            p.sensors.iter().any(|s| sensors[usize::from(s.0)].energy_method() == Some(Method::Model))
        });
        match (&panel, spec.energy) {
            (None, Energy::Measured) => return Err(LabError::NotMeasurable { why: why() }),
            (Some(_), Energy::Measured) if modelled || chosen_for.is_some_and(|w| !measures(w)) => {
                return Err(LabError::NotMeasurable { why: why() });
            }
            (None, _) => warnings.push(Warning::NoEnergy { why: why() }),
            (Some(_), _) if modelled => warnings.push(Warning::EnergyEstimated { why: why() }),
            _ => {}
        }
        if let Some(worker) = worker.filter(|w| panel.is_some() && !measures(*w)) {
            warnings.push(Warning::OtherDevice { worker });
        }
        let asked = spec.source_param.iter().filter(|(key, _)| key.ends_with(".interval_ms"));
        let intervals = asked.filter_map(|(_, value)| value.parse::<f64>().ok()).chain([spec.interval_ms]);
        let tried = opened.tried.clone();
        let meter = Meter::start(opened.sources, Duration::from_secs_f64(spec.interval_ms * 1e-3))
            .map_err(|error| LabError::System { what: "cannot start the sampler", error })?;
        Ok(Self {
            meter: Some(meter),
            panel,
            tried,
            qualified: Vec::new(),
            warnings,
            early: Vec::new(),
            happened: Vec::new(),
            attribution: None,
            worker: chosen_for,
            slowest_read_s: intervals.fold(0.0, f64::max) * 1e-3,
        })
    }

    /// Looks at the sensors until their periods are known, and no longer believes a counter that its own device's power
    /// contradicts: then power is integrated. docs/method.md#qualification
    pub(crate) async fn qualify(&mut self) {
        let Some(meter) = &mut self.meter else { return };
        let mut qualifier = Qualifier::new(meter.sensors());
        let look = if qualifier.compares() { LONGEST_LOOK_NS } else { SHORT_LOOK_NS };
        let limit = clock::now().plus_nanos(look);
        while !qualifier.is_sure() && clock::now() < limit {
            tokio::time::sleep(LOOK).await;
            meter.drain(|reading| {
                qualifier.push(reading);
                self.early.push(*reading);
            });
        }
        self.qualified = qualifier.finish();
        let doubted: Vec<SensorId> = (0u16..)
            .zip(&self.qualified)
            .filter(|(_, q)| q.is_doubtful())
            .map(|(id, _)| SensorId(id))
            .collect();
        for qualification in self.qualified.iter().filter(|q| q.is_doubtful()) {
            self.warnings.push(Warning::CounterDoubted {
                sensor: qualification.sensor.clone(),
                ratio: qualification.ratio.unwrap_or(f64::NAN),
            });
        }
        if !doubted.is_empty() {
            self.panel = Panel::choose(meter.sensors(), self.worker, &doubted);
        }
    }

    /// A run is of one set of sensors: two sessions that differ would add up to nothing.
    pub(crate) fn check_unchanged(&self, info: &RunInfo, run: &Path) -> Result<(), LabError> {
        let names =
            |sensors: &[Sensor]| sensors.iter().map(|s| s.name.as_str()).collect::<Vec<_>>().join(", ");
        let (then, now) = (names(&info.sensors), names(self.sensors()));
        match then == now {
            true => Ok(()),
            false => Err(LabError::changed("set of sensors", run, then, now)),
        }
    }

    /// Sums the sensors of these names, as an earlier session did.
    pub(crate) fn keep_panel(&mut self, names: &[String]) {
        let sensors = self.meter.as_ref().map_or(&[][..], Meter::sensors);
        let kept = (0u16..).zip(sensors).filter(|(_, s)| names.contains(&s.name));
        let kept: Vec<SensorId> = kept.map(|(id, _)| SensorId(id)).collect();
        if let Some(panel) = self.panel.as_mut().filter(|_| kept.len() == names.len()) {
            panel.sensors = kept;
        }
    }

    pub(crate) fn sensors(&self) -> &[Sensor] {
        self.meter.as_ref().map_or(&[], Meter::sensors)
    }

    /// Seconds between changes of the slowest sensor whose sum is the energy: as it was seen to change, or else is read.
    pub(crate) fn slowest_s(&self) -> f64 {
        let sensors = self.sensors();
        let seen = |id: &SensorId| {
            let sensor = &sensors[usize::from(id.0)];
            let period = self.qualified.iter().find(|q| q.sensor == sensor.name).and_then(|q| q.period_s);
            period.unwrap_or(0.0).max(sensor.averaged_s)
        };
        let slowest = self.panel.iter().flat_map(|p| &p.sensors).map(seen).fold(0.0, f64::max);
        slowest.max(self.slowest_read_s)
    }

    /// Kinds of the devices whose sum is the energy.
    pub(crate) fn panel_devices(&self) -> impl Iterator<Item = DeviceKind> + '_ {
        self.panel.iter().flat_map(|p| &p.sensors).map(|s| self.sensors()[usize::from(s.0)].device.kind)
    }

    /// Names of the sensors whose sum is the energy.
    pub(crate) fn panel_names(&self) -> Vec<String> {
        let chosen = self.panel.iter().flat_map(|p| &p.sensors);
        chosen.map(|s| self.sensors()[usize::from(s.0)].name.clone()).collect()
    }
}

/// The process that is metered with everything below it: a command is everything below this one. No process of this machine is below
/// a pretended root.
fn tree(spec: &Spec, server: Option<u32>) -> Option<String> {
    let pid = server.map(|pid| pid.to_string()).or((!spec.command.is_empty()).then(|| "self".to_owned()));
    pid.filter(|_| spec.root.is_none())
}

/// Opens the first session of a run for the source `replay`. A later one may be of another boot, whose clock and counters began
/// anew.
pub fn recording(run: &Path) -> Result<Recording, String> {
    let open = || {
        let dir = RunDir::open(run)?;
        Ok((dir.info()?.sensors, dir.stored_readings()?))
    };
    let (sensors, stored) = open().map_err(|e: wattle_store::StoreError| e.to_string())?;
    let mut first = None;
    let readings = stored.map_while(move |row| match row {
        Ok((session, reading)) => (session == *first.get_or_insert(session)).then_some(Ok(reading)),
        Err(e) => Some(Err(e.to_string())),
    });
    Ok(Recording { sensors, readings: Box::new(readings) })
}
