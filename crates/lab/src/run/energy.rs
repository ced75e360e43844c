//! What a run's energy comes from: decided once, before anything is written, by the spec, the machine and where the model runs.

use crate::LabError;
use crate::client::{Client, Place};
use std::path::{Path, PathBuf};
use std::time::Duration;
use wattle_core::sensor::{DeviceKind, Panel, Sensor};
use wattle_core::spec::{Energy, Spec};
use wattle_core::summary::SourceInfo;
use wattle_core::{Method, Warning};
use wattle_meter::Meter;
use wattle_meter::source::{self, Recording, Wanted};
use wattle_store::RunDir;

/// The running meter, or the reasons why there is none.
pub(super) struct Metering {
    pub(super) meter: Option<Meter>,
    panel: Option<Panel>,
    tried: Vec<SourceInfo>,
    pub(super) warnings: Vec<Warning>,
}

impl Metering {
    /// Opens what `spec` asks for and starts reading.
    pub(super) fn open(spec: &Spec, client: &dyn Client) -> Result<Self, LabError> {
        let without = |why: String| Self {
            meter: None,
            panel: None,
            tried: Vec::new(),
            warnings: vec![Warning::NoEnergy { why }],
        };
        match (spec.energy, client.place()) {
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
        let worker = client.worker().filter(|_| spec.source.is_empty());
        let opened = source::open(&Wanted {
            names: spec.source.clone(),
            params: spec.source_param.clone(),
            root: spec.root.as_ref().map(PathBuf::from),
            estimate: spec.energy == Energy::Auto,
            worker,
            lenient: false,
            recordings: Some(recording),
        })?;
        let sensors: Vec<Sensor> = opened.sources.iter().flat_map(|s| s.sensors().iter().cloned()).collect();
        let panel = Panel::choose(&sensors, worker);
        let measures = |kind: DeviceKind| {
            let chosen = panel.iter().flat_map(|p| &p.sensors).map(|s| &sensors[usize::from(s.0)]);
            chosen.map(|s| s.device.kind).any(|k| k == kind || k == DeviceKind::Machine)
        };
        let why = || {
            let reasons =
                opened.tried.iter().filter_map(|s| Some(format!("{}: {}", s.name, s.unavailable.as_ref()?)));
            let reasons = reasons.collect::<Vec<_>>().join("; ");
            match worker {
                Some(DeviceKind::Cpu) if !reasons.is_empty() => {
                    format!("the model runs on the CPU; {reasons}")
                }
                _ if reasons.is_empty() => "none of the sources asked for measures energy".to_owned(),
                _ => reasons,
            }
        };
        let mut warnings: Vec<Warning> =
            opened.pretended.iter().map(|what| Warning::PretendedHardware { what: what.clone() }).collect();
        let modelled = panel.as_ref().is_some_and(|p| {
            p.sensors.iter().any(|s| sensors[usize::from(s.0)].energy_method() == Some(Method::Model))
        });
        match (&panel, spec.energy) {
            (None, Energy::Measured) => return Err(LabError::NotMeasurable { why: why() }),
            (Some(_), Energy::Measured) if modelled || worker.is_some_and(|w| !measures(w)) => {
                return Err(LabError::NotMeasurable { why: why() });
            }
            (None, _) => warnings.push(Warning::NoEnergy { why: why() }),
            (Some(_), _) if modelled => warnings.push(Warning::EnergyEstimated { why: why() }),
            _ => {}
        }
        if let Some(worker) = client.worker().filter(|w| panel.is_some() && !measures(*w)) {
            warnings.push(Warning::OtherDevice { worker });
        }
        let tried = opened.tried.clone();
        let meter = Meter::start(opened.sources, Duration::from_secs_f64(spec.interval_ms * 1e-3))
            .map_err(|error| LabError::System { what: "cannot start the sampler", error })?;
        Ok(Self { meter: Some(meter), panel, tried, warnings })
    }

    pub(super) fn sensors(&self) -> &[Sensor] {
        self.meter.as_ref().map_or(&[], Meter::sensors)
    }

    pub(super) fn panel(&self) -> Option<&Panel> {
        self.panel.as_ref()
    }

    pub(super) fn tried(&self) -> &[SourceInfo] {
        &self.tried
    }
}

/// The first session of a run. A later one may be of another boot, whose clock and counters began anew.
fn recording(run: &Path) -> Result<Recording, String> {
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
