//! RAPL as it is opened and sampled in a run, on made-up machines.
#![allow(clippy::unwrap_used)] // A test may, also in what its tests share.

mod powercap;

use powercap::{RANGE, Tree};
use std::time::Duration;
use wattle_core::sensor::{DeviceKind, Kind, Panel, Perimeter, SensorId};
use wattle_core::time::Span;
use wattle_core::timeline::Timeline;
use wattle_meter::source::{self, Depth, OpenError, Opened, Wanted};
use wattle_meter::{Meter, clock};

fn open(tree: &Tree) -> Result<Opened, OpenError> {
    let root = Some(tree.root().to_owned());
    source::open(&Wanted { names: vec!["rapl".into()], root, ..Wanted::default() })
}

fn refusal(tree: &Tree) -> String {
    open(tree).err().expect("the source must not open").to_string()
}

fn read(opened: &mut Opened) -> Vec<Option<f64>> {
    let mut seen = Vec::new();
    opened.sources[0].read(Depth::Fast, &mut |i, value| {
        assert_eq!(i, seen.len());
        seen.push(value);
    });
    seen
}

#[test]
fn packages_and_dram_of_every_socket_and_nothing_twice() {
    let opened = open(&Tree::two_sockets()).unwrap();
    let sensors = opened.sources[0].sensors();
    let names: Vec<&str> = sensors.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "rapl/package-0/energy",
            "rapl/package-0/dram/energy",
            "rapl/package-1/energy",
            "rapl/package-1/dram/energy",
        ]
    );
    let kinds: Vec<DeviceKind> = sensors.iter().map(|s| s.device.kind).collect();
    assert_eq!(kinds, [DeviceKind::Cpu, DeviceKind::Dram, DeviceKind::Cpu, DeviceKind::Dram]);
    let panel = Panel::choose(sensors, None, &[]).unwrap();
    assert_eq!((panel.sensors.len(), panel.perimeter), (4, Perimeter::Host));
    assert_eq!(opened.pretended.len(), 1, "another root is said");
}

#[test]
fn sockets_are_in_order_also_beyond_ten() {
    let tree = Tree::empty();
    for n in [10, 2, 0] {
        tree.zone("intel-rapl", &format!("intel-rapl:{n}"), &format!("package-{n}"));
    }
    let opened = open(&tree).unwrap();
    let ids: Vec<&str> = opened.sources[0].sensors().iter().map(|s| s.device.id.as_str()).collect();
    assert_eq!(ids, ["package-0", "package-2", "package-10"]);
}

#[test]
fn a_counter_is_in_joules_and_knows_where_it_wraps() {
    let tree = Tree::two_sockets();
    let mut opened = open(&tree).unwrap();
    tree.set("intel-rapl:1", 12.345678);
    assert_eq!(read(&mut opened), [Some(1.0), Some(1.0), Some(12.345678), Some(1.0)]);
    assert_eq!(opened.sources[0].sensors()[0].kind, Kind::Counter { wrap: Some(RANGE) });
}

#[test]
fn a_wrap_while_sampling_loses_no_joule() {
    let tree = Tree::two_sockets();
    tree.set("intel-rapl:0", RANGE - 3.0);
    let opened = open(&tree).unwrap();
    let start = clock::now();
    let mut meter = Meter::start(opened.sources, Duration::from_millis(1)).unwrap();
    for joules in [RANGE - 2.0, RANGE - 1.0, 0.5, 1.5, 2.5] {
        // Two rounds after a write, one began after it.
        let written = meter.cost().rounds;
        while meter.cost().rounds < written + 2 {
            std::thread::yield_now();
        }
        tree.set("intel-rapl:0", joules);
    }
    meter.stop();
    let mut timeline = Timeline::new(meter.sensors());
    meter.drain(|r| timeline.push(r));
    let energy = timeline.energy(SensorId(0), Span::new(start, clock::now())).unwrap();
    // The first change only tells where counting begins.
    assert!((energy.value().get() - 4.5).abs() < 1e-6, "{energy:?}");
    let seen = timeline.anomalies(SensorId(0));
    assert_eq!((seen.wraps, seen.resets, seen.failed), (1, 0, 0));
}

#[test]
fn a_machine_without_rapl_is_told_what_to_do() {
    let tree = Tree::empty();
    assert!(refusal(&tree).contains("modprobe intel_rapl_msr"));
    std::fs::create_dir_all(tree.root().join("sys/class/powercap")).unwrap();
    assert!(refusal(&tree).contains("no RAPL package"));
}

#[test]
fn a_part_of_the_machine_is_not_passed_off_as_all_of_it() {
    let tree = Tree::two_sockets();
    for zone in ["intel-rapl:0/intel-rapl:0:2", "intel-rapl:1"] {
        // A folder cannot be read as a file, not even by root.
        std::fs::remove_file(tree.file(zone, "energy_uj")).unwrap();
        std::fs::create_dir(tree.file(zone, "energy_uj")).unwrap();
    }
    let refusal = refusal(&tree);
    assert!(refusal.contains("intel-rapl:0:2/energy_uj"), "{refusal}");
    assert!(refusal.contains("intel-rapl:1/energy_uj"), "{refusal}");
    assert!(!refusal.contains("intel-rapl:0/energy_uj"), "{refusal}");
}

#[test]
fn zones_that_a_container_hides_are_refused_with_the_way_out() {
    let tree = Tree::two_sockets();
    // What Docker leaves: the links, leading nowhere.
    std::fs::remove_dir_all(tree.root().join("sys/devices")).unwrap();
    let refusal = refusal(&tree);
    assert!(refusal.contains("systempaths=unconfined"), "{refusal}");
}

#[test]
fn garbage_is_refused_when_opened() {
    for (file, text) in [
        ("energy_uj", "many"),
        ("energy_uj", "-5"),
        ("energy_uj", ""),
        ("max_energy_range_uj", "1.5"),
        ("max_energy_range_uj", "0"),
    ] {
        let tree = Tree::two_sockets();
        std::fs::write(tree.file("intel-rapl:0", file), text).unwrap();
        let refusal = refusal(&tree);
        assert!(refusal.contains(&format!("intel-rapl:0/{file}: invalid data")), "{text:?}: {refusal}");
    }
}

#[test]
fn garbage_and_emptiness_later_are_gaps_of_that_counter_alone() {
    let tree = Tree::two_sockets();
    let mut opened = open(&tree).unwrap();
    for text in ["garbage", "", "\u{fffd}", "12 13", "99999999999999999999999"] {
        std::fs::write(tree.file("intel-rapl:0", "energy_uj"), text).unwrap();
        assert_eq!(read(&mut opened), [None, Some(1.0), Some(1.0), Some(1.0)], "{text:?}");
    }
    tree.set("intel-rapl:0", 7.0);
    assert_eq!(read(&mut opened)[0], Some(7.0));
}
