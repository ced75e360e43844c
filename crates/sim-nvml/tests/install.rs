//! Only here, not in the crate's unit tests, does cargo build the shared library as well.

use wattle_sim_nvml::{Sim, library_path};

#[test]
fn the_library_is_found_next_to_a_test() {
    assert!(library_path().is_file());
}

#[test]
fn every_copy_has_its_own_scenario() {
    let folder = tempfile::tempdir().unwrap();
    let sim = Sim::install(folder.path(), r#"{"devices": [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}]}"#).unwrap();
    assert!(sim.library.is_file());
    assert_eq!(sim.scenario.devices.len(), 2);
}

#[test]
fn a_bad_scenario_is_refused_before_it_is_installed() {
    let folder = tempfile::tempdir().unwrap();
    let error = Sim::install(folder.path(), r#"{"devices": [{"pwoer": []}]}"#).unwrap_err();
    assert!(error.to_string().contains("pwoer"), "{error}");
    assert!(!folder.path().join("libnvidia-ml.so.1").exists());
}
