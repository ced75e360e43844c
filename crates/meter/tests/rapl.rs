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
fn an_amd_package_is_read_without_its_cores() {
    let tree = Tree::empty();
    tree.zone("intel-rapl", "intel-rapl:0", "package-0");
    tree.zone("intel-rapl", "intel-rapl:0/intel-rapl:0:0", "core");
    let opened = open(&tree).unwrap();
    let names: Vec<&str> = opened.sources[0].sensors().iter().map(|s| s.name.as_str()).collect();
    assert_eq!(names, ["rapl/package-0/energy"]);
}

#[test]
fn every_die_of_a_socket_is_a_device() {
    let tree = Tree::empty();
    for (n, name) in [(0, "package-0-die-0"), (1, "package-0-die-1"), (2, "package-1-die-0")] {
        tree.zone("intel-rapl", &format!("intel-rapl:{n}"), name);
        tree.zone("intel-rapl", &format!("intel-rapl:{n}/intel-rapl:{n}:0"), "dram");
    }
    let opened = open(&tree).unwrap();
    let sensors = opened.sources[0].sensors();
    assert_eq!(sensors.len(), 6);
    assert_eq!(sensors[3].name, "rapl/package-0-die-1/dram/energy");
    assert_eq!(Panel::choose(sensors, None, &[]).unwrap().sensors.len(), 6);
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

/// Opens RAPL by perf events, or sees to it that a system which forbids them is named as the reason.
fn open_by_perf(tree: &Tree) -> Option<Opened> {
    match open(tree) {
        Ok(opened) => Some(opened),
        Err(e) => {
            let told = e.to_string();
            assert!(told.contains("perf_event_open of energy-pkg on CPU 0: "), "{told}");
            let forbidden = ["Operation not permitted", "Permission denied", "Function not implemented"];
            let reason = forbidden.iter().find(|r| told.contains(*r));
            assert!(reason.is_some(), "perf events are there and cannot be used: {told}");
            let permission = reason != Some(&"Function not implemented");
            assert_eq!(told.contains("kernel.perf_event_paranoid=0"), permission, "{told}");
            None
        }
    }
}

#[test]
fn where_powercap_is_hidden_perf_events_are_read_under_the_same_names() {
    let tree = Tree::two_sockets();
    std::fs::remove_dir_all(tree.root().join("sys/devices")).unwrap();
    tree.pmu(&["energy-cores", "energy-pkg", "energy-gpu", "energy-ram", "energy-psys"]);
    let Some(mut opened) = open_by_perf(&tree) else { return };
    let sensors = opened.sources[0].sensors().to_vec();
    let names: Vec<&str> = sensors.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(names, ["rapl/package-0/energy", "rapl/package-0/dram/energy"]);
    let by_powercap = open(&Tree::two_sockets()).unwrap();
    for (perf, powercap) in sensors.iter().zip(by_powercap.sources[0].sensors()) {
        assert_eq!(perf.device, powercap.device);
        assert_eq!((perf.perimeter, perf.trust), (powercap.perimeter, powercap.trust));
        assert_eq!(perf.kind, Kind::Counter { wrap: None }, "the kernel follows the wraps");
    }
    assert!(read(&mut opened).iter().all(Option::is_some));
    let facts = &opened.tried[0].facts;
    assert_eq!(facts["way"], "perf");
    assert!(facts["path"].ends_with("/sys/bus/event_source/devices/power"), "{facts:?}");
}

#[test]
fn an_event_counts_from_when_it_was_opened_and_at_its_scale() {
    let tree = Tree::empty();
    tree.pmu(&["energy-pkg"]);
    let opening = clock::now();
    let Some(mut opened) = open_by_perf(&tree) else { return };
    let first = read(&mut opened)[0].unwrap();
    clock::sleep_until(clock::now().plus_nanos(50_000_000));
    let before = clock::now();
    let second = read(&mut opened)[0].unwrap();
    // One joule a second: no more than has passed since it was opened, and no less than between the reads.
    assert!(second <= clock::now().since(opening).get(), "{second}");
    assert!(second - first > 0.049 && second > before.since(opening).get() * 0.5, "{first} {second}");
}

#[test]
fn powercap_comes_before_perf_events() {
    let tree = Tree::two_sockets();
    tree.pmu(&["energy-pkg"]);
    let opened = open(&tree).unwrap();
    assert_eq!(opened.sources[0].sensors().len(), 4);
    assert_eq!(opened.tried[0].facts["way"], "powercap");
    assert!(opened.tried[0].facts["path"].contains("intel-rapl:1/intel-rapl:1:0"));
}

#[test]
fn when_both_ways_are_closed_both_reasons_are_told() {
    let pmu = "sys/bus/event_source/devices/power";
    for (file, text, reason) in [
        ("type", "many", "power/type says \"many\""),
        ("cpumask", "", "power/cpumask says \"\""),
        // No machine has it.
        ("cpumask", "65535", "cpu65535/topology/physical_package_id"),
        ("events/energy-pkg", "config=2", "energy-pkg says \"config=2\""),
        ("events/energy-pkg.unit", "Calories", "in Calories, not in Joules"),
        ("events/energy-pkg.scale", "-1", "scale -1"),
        ("events/energy-pkg.scale", "inf", "scale inf"),
    ] {
        let tree = Tree::empty();
        tree.pmu(&["energy-pkg"]);
        tree.write(&format!("{pmu}/{file}"), text);
        let refusal = refusal(&tree);
        assert!(refusal.contains("no RAPL package in "), "{refusal}");
        assert!(refusal.contains(reason), "{reason}: {refusal}");
    }
    // What a small virtual machine shows.
    let tree = Tree::empty();
    tree.pmu(&["energy-psys"]);
    assert!(refusal(&tree).contains("counts no packages (energy-pkg)"));
}

#[test]
fn a_pmu_number_that_the_kernel_does_not_know_is_refused() {
    let tree = Tree::empty();
    tree.pmu(&["energy-pkg"]);
    tree.write("sys/bus/event_source/devices/power/type", "4000000000\n");
    assert!(refusal(&tree).contains("perf_event_open of energy-pkg on CPU 0: "));
}
