//! The joules of a closure, against a stand-in library whose joules are known.
#![allow(clippy::unwrap_used)] // A test may.

use wattle_core::estimate::Method;
use wattle_core::registry::Params;
use wattle_core::sensor::Perimeter;
use wattle_meter::source::Wanted;
use wattle_meter::{JouleError, Joulemeter, clock};
use wattle_sim_nvml::Sim;

fn wanted(folder: &tempfile::TempDir) -> (Sim, Wanted) {
    let sim =
        Sim::install(folder.path(), r#"{"devices": [{"power": [[0, 80], [0.7, 240]], "period_s": 1.3}]}"#);
    let sim = sim.unwrap();
    let params = Params::from([("nvml.library".to_owned(), sim.library.display().to_string())]);
    (sim, Wanted { names: vec!["nvml".into()], params, ..Wanted::default() })
}

#[test]
fn a_closure_has_its_joules_within_the_bound() {
    let folder = tempfile::tempdir().unwrap();
    let (sim, wanted) = wanted(&folder);
    let mut meter = Joulemeter::with(&wanted).unwrap();
    assert_eq!(meter.perimeter(), Perimeter::Device);
    for ms in [300, 2600] {
        let ((from, until), energy) = meter.measure(|| {
            let from = clock::now();
            std::thread::sleep(std::time::Duration::from_millis(ms));
            (from, clock::now())
        });
        let (energy, truth) = (energy.unwrap(), sim.scenario.devices[0].joules(from.nanos(), until.nanos()));
        assert!((energy.value().get() - truth).abs() <= energy.bound().get(), "{energy} for {truth} J");
        assert_eq!((energy.method(), energy.coverage()), (Method::Counter, 1.0));
    }
}

#[test]
fn nothing_to_measure_with_is_told() {
    let root = Some(tempfile::tempdir().unwrap().path().to_owned());
    let wanted = Wanted { root, names: vec!["procstat".into()], lenient: true, ..Wanted::default() };
    let error = Joulemeter::with(&wanted).err().unwrap();
    assert!(
        matches!(error, JouleError::Nothing(_)) && error.to_string().contains("wattle doctor"),
        "{error}"
    );
}
