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
    let mut kin = Kin::before();
    // A session of its own, and its parent ends at once.
    let script = "setsid sh -c 'sleep 601 & exit' & sleep 602";
    let head = Child::spawn_bound(Command::new("sh").args(["-c", script])).unwrap();
    let spared = Child::spawn(Command::new("sleep").arg("603")).unwrap();
    kin.spare(spared.pid());
    std::thread::sleep(Duration::from_millis(300));
    head.signal_group(9);
    head.wait().unwrap();
    kin.look();
    assert!(kin.lives(), "the one that left the group");
    while kin.lives() {
        kin.kill();
        kin.reap(head.pid());
        std::thread::sleep(Duration::from_millis(5));
        kin.look();
    }
    assert_eq!((stranger.end(), spared.end()), (None, None));
    for child in [stranger, spared, head] {
        child.signal(9);
        child.wait().unwrap();
        child.reap().unwrap();
    }
}
