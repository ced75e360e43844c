//! A program is ended with all that it started. In a process of its own: other tests start programs too.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use std::process::Command;
use std::time::Duration;
use wattle_meter::child::{Child, adopt_orphans};
use wattle_meter::kin::Kin;

#[test]
fn who_left_the_group_and_lost_its_parent_is_found_and_a_stranger_is_left_alone() {
    adopt_orphans();
    let stranger = Child::spawn(Command::new("sleep").arg("600")).unwrap();
    // Bystanders that lose their parent while the program runs: one that was there before it, and one that began after it.
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).display().to_string();
    let (go, early, late) = (file("go"), file("early"), file("late"));
    let script = format!(
        "sleep 604 & echo $! > {early}; while [ ! -e {go} ]; do sleep 0.02; done; sleep 605 & echo $! > {late}"
    );
    let family = Child::spawn(Command::new("sh").args(["-c", &script])).unwrap();
    let early = number(&early);
    let mut kin = Kin::before();
    // A session of its own, and its parent ends at once.
    let script = "setsid sh -c 'sleep 601 & exit' & sleep 602";
    let head = Child::spawn_bound(Command::new("sh").args(["-c", script])).unwrap();
    kin.begin(head.pid());
    std::fs::write(&go, "").unwrap();
    let late = number(&late);
    family.wait().unwrap();
    family.reap().unwrap();
    let spared = Child::spawn(Command::new("sleep").arg("603")).unwrap();
    kin.spare(spared.pid());
    std::thread::sleep(Duration::from_millis(300));
    head.signal_group(9);
    head.wait().unwrap();
    kin.look();
    assert!(kin.lives(), "the one that left the group");
    while kin.lives() {
        kin.kill();
        kin.reap();
        std::thread::sleep(Duration::from_millis(5));
        kin.look();
    }
    assert_eq!((stranger.end(), spared.end()), (None, None));
    for pid in [early, late] {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        assert!(stat.contains("(sleep) S"), "a bystander was killed: {stat}");
        assert!(Command::new("kill").arg(pid).status().unwrap().success());
    }
    for child in [stranger, spared, head] {
        child.signal(9);
        child.wait().unwrap();
        child.reap().unwrap();
    }
}

/// What a script wrote to a file.
fn number(path: &str) -> String {
    for _ in 0..1000 {
        match std::fs::read_to_string(path) {
            Ok(text) if text.ends_with('\n') => return text.trim().to_owned(),
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    panic!("{path} did not come");
}
