//! Which NVIDIA boards are read and what is kept about them, on a stand-in library.
#![allow(clippy::unwrap_used)] // A test may, also in what its tests share.

use std::collections::BTreeMap;
use std::process::Command;
use wattle_core::registry::Params;
use wattle_meter::source::{self, Depth, OpenError, Opened, Wanted};
use wattle_sim_nvml::Sim;

/// Two boards that are alike, and one that is split.
const BOARDS: &str = r#"
    {"uuid": "GPU-aaaa", "pci": "0000:01:00.0", "processes": [41, 42]},
    {"uuid": "GPU-aabb", "pci": "0000:02:00.0", "graphics_processes": [43], "power_limit": 300},
    {"uuid": "GPU-cccc", "pci": "0001:01:00.0", "name": "Other", "mig": ["MIG-1", "MIG-2"], "architecture": 7}"#;

/// Says where the test that runs again in a process of its own finds its library.
const CHILD: &str = "WATTLE_TEST_LIBRARY";

struct Machine {
    folder: tempfile::TempDir,
    sim: Sim,
}

impl Machine {
    fn new(boards: &str) -> Machine {
        let folder = tempfile::tempdir().unwrap();
        let sim = Sim::install(folder.path(), &format!(r#"{{"devices": [{boards}]}}"#)).unwrap();
        Machine { folder, sim }
    }

    fn open(&self, options: &[(&str, &str)]) -> Result<Opened, OpenError> {
        open(&self.sim.library.display().to_string(), options)
    }

    fn chosen(&self, options: &[(&str, &str)]) -> Vec<String> {
        boards(&self.open(options).unwrap())
    }

    fn refused(&self, options: &[(&str, &str)]) -> String {
        self.open(options).err().unwrap().to_string()
    }
}

fn open(library: &str, options: &[(&str, &str)]) -> Result<Opened, OpenError> {
    let options = std::iter::once(("library", library)).chain(options.iter().copied());
    let params: Params = options.map(|(key, value)| (format!("nvml.{key}"), value.to_owned())).collect();
    source::open(&Wanted { names: vec!["nvml".into()], params, ..Wanted::default() })
}

fn boards(opened: &Opened) -> Vec<String> {
    let mut ids: Vec<String> = opened.sources[0].sensors().iter().map(|s| s.device.id.clone()).collect();
    ids.dedup();
    ids
}

fn facts(opened: &Opened) -> &BTreeMap<String, String> {
    &opened.tried[0].facts
}

#[test]
fn every_board_is_read_unless_some_are_named() {
    let machine = Machine::new(BOARDS);
    assert_eq!(machine.chosen(&[]), ["GPU-aaaa", "GPU-aabb", "GPU-cccc"]);
    assert_eq!(machine.chosen(&[("device", "all")]), ["GPU-aaaa", "GPU-aabb", "GPU-cccc"]);
    for device in
        ["1", "GPU-aabb", "GPU-aab", "0000:02:00.0", "00000000:02:00.0", "02:00.0", "1,GPU-aab,02:00"]
    {
        assert_eq!(machine.chosen(&[("device", device)]), ["GPU-aabb"], "{device}");
    }
    assert_eq!(machine.chosen(&[("device", "0001:01:00.0,0")]), ["GPU-aaaa", "GPU-cccc"]);
}

#[test]
fn a_board_that_is_not_there_is_refused_with_those_that_are() {
    let machine = Machine::new(BOARDS);
    for device in ["3", "GPU-x", "GPU-aa", "MIG-9", "03:00.0", "first"] {
        let error = machine.refused(&[("device", device)]);
        assert!(error.contains(&format!("nvml.device={device}: \"{device}\"")), "{error}");
        assert!(error.contains("0: GPU-aaaa (Pretend 100, 00000000:01:00.0), 1: GPU-aabb"), "{error}");
        assert!(error.contains("nvml.device=…"), "{error}");
    }
}

#[test]
fn a_process_chooses_the_boards_it_is_on() {
    let machine = Machine::new(BOARDS);
    assert_eq!(machine.chosen(&[("pid", "42")]), ["GPU-aaaa"]);
    assert_eq!(machine.chosen(&[("pid", "43")]), ["GPU-aabb"], "also one that only draws");
    assert_eq!(machine.chosen(&[("pid", "43, 41")]), ["GPU-aaaa", "GPU-aabb"]);
    let error = machine.refused(&[("pid", "44")]);
    assert!(error.contains("nvml.pid=44 has nothing on any board"), "{error}");
    let without = Machine::new(r#"{"processes": [42], "without": ["processes"]}"#);
    assert!(without.refused(&[("pid", "42")]).contains("has nothing"));
}

#[test]
fn a_mig_instance_stands_for_its_whole_board_and_that_is_said() {
    let machine = Machine::new(BOARDS);
    for device in ["MIG-2", "MIG-GPU-cccc/1/0"] {
        let opened = machine.open(&[("device", device)]).unwrap();
        assert_eq!(boards(&opened), ["GPU-cccc"]);
        assert!(facts(&opened)["choice of boards"].contains("energy is that of the whole board"));
        assert_eq!(facts(&opened)["GPU-cccc/mig"], "enabled: energy is of the whole board");
    }
}

#[test]
fn what_a_board_is_and_how_it_was_chosen_is_kept() {
    let opened = Machine::new(BOARDS).open(&[("device", "1")]).unwrap();
    let expected = [
        ("GPU-aabb/architecture", "Hopper"),
        ("GPU-aabb/default power limit", "300 W"),
        ("GPU-aabb/index", "1"),
        ("GPU-aabb/name", "Pretend 100"),
        ("GPU-aabb/pci", "00000000:02:00.0"),
        ("GPU-aabb/power limit", "300 W"),
        ("boards", "1 of 3, by device=1"),
        (
            "boards left out",
            "0: GPU-aaaa (Pretend 100, 00000000:01:00.0); 2: GPU-cccc (Other, 00000001:01:00.0)",
        ),
        ("driver", "999.00 (wattle-sim-nvml)"),
        ("library version", "13.999.00"),
    ];
    let facts: Vec<(&str, &str)> = facts(&opened).iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    assert_eq!(facts, expected);
}

#[test]
fn a_board_that_shows_no_energy_is_named_and_the_others_are_read() {
    let machine = Machine::new(
        r#"{"uuid": "GPU-a", "without": ["energy_counter", "power_instant", "power_average"]}, {"uuid": "GPU-b"}"#,
    );
    let opened = machine.open(&[]).unwrap();
    assert_eq!(facts(&opened)["GPU-a/energy"], "neither counter nor power");
    assert!(!facts(&opened).contains_key("GPU-b/energy"));
}

#[test]
fn a_board_without_a_uuid_goes_by_its_place_and_one_without_either_is_left_out() {
    let machine =
        Machine::new(r#"{"uuid": "a", "without": ["uuid"]}, {"uuid": "b", "without": ["uuid", "pci"]}"#);
    let opened = machine.open(&[]).unwrap();
    assert_eq!(boards(&opened), ["00000000:01:00.0"]);
    assert!(facts(&opened)["boards left out"].contains("1: it says neither UUID nor place"));
    let none = Machine::new(r#"{"without": ["uuid", "pci"]}"#);
    assert!(none.refused(&[]).contains("shows no board that can be read (0: it says neither"));
}

#[test]
fn average_power_says_over_how_long() {
    let averaged = |board: &str| {
        let opened = Machine::new(board).open(&[]).unwrap();
        let sensors = opened.sources[0].sensors();
        let power = sensors.iter().find(|s| s.name.ends_with("/power_average")).unwrap();
        assert!(sensors.iter().all(|s| s.averaged_s == 0.0 || s.name == power.name));
        power.averaged_s
    };
    let board = |rest: &str| format!(r#"{{"without": ["power_instant"], {rest}}}"#);
    assert_eq!(averaged(&board(r#""architecture": 8"#)), 1.0);
    assert_eq!(
        averaged(&board(r#""architecture": 7, "name": "NVIDIA A100-SXM4-40GB", "average_s": 0"#)),
        0.0
    );
    assert_eq!(averaged(&board(r#""architecture": 6, "average_s": 0"#)), 0.0);
    assert_eq!(averaged(r#"{"without": ["power_instant", "architecture"]}"#), 1.0);
}

#[test]
fn a_fast_read_is_energy_and_power_of_every_board() {
    let machine = Machine::new(BOARDS);
    let mut opened = machine.open(&[]).unwrap();
    let names: Vec<String> = opened.sources[0].sensors().iter().map(|s| s.name.clone()).collect();
    let mut read = Vec::new();
    opened.sources[0].read(Depth::Fast, &mut |i, value| {
        assert!(value.is_some());
        read.push(names[i].rsplit('/').next().unwrap());
    });
    assert_eq!(read, ["energy", "power_instant"].repeat(3));
}

#[test]
fn cuda_visible_devices_chooses_where_nobody_else_does() {
    // The environment belongs to the whole process, so this test runs itself again in another.
    if let Ok(library) = std::env::var(CHILD) {
        match open(&library, &[]) {
            Ok(opened) => println!("boards: {:?}; facts: {:?};", boards(&opened), facts(&opened)),
            Err(error) => println!("{error}"),
        }
        assert_eq!(boards(&open(&library, &[("device", "all")]).unwrap()).len(), 3);
        return;
    }
    let machine = Machine::new(BOARDS);
    let child = |visible: &str, order: &str| {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["cuda_visible_devices_chooses_where_nobody_else_does", "--exact", "--nocapture"])
            .env(CHILD, &machine.sim.library)
            .env("CUDA_VISIBLE_DEVICES", visible)
            .env("CUDA_DEVICE_ORDER", order)
            .current_dir(machine.folder.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}");
        said
    };
    let said = child("1", "PCI_BUS_ID");
    assert!(said.contains(r#"boards: ["GPU-aabb"]"#) && said.contains("by CUDA_VISIBLE_DEVICES=1"), "{said}");
    assert!(!said.contains("ambiguous"), "{said}");
    assert!(child("1", "FASTEST_FIRST").contains("ambiguous"));
    assert!(child("GPU-c,7,GPU-aabb", "").contains(r#"boards: ["GPU-cccc"]"#));
    assert!(child("MIG-1,0", "").contains(r#"boards: ["GPU-aaaa", "GPU-cccc"]"#));
    for none in ["", "-1"] {
        let said = child(none, "");
        assert!(
            said.contains(&format!("CUDA_VISIBLE_DEVICES={none} shows this process none of them")),
            "{said}"
        );
        assert!(said.contains("GPU-aabb"), "{said}");
    }
}
