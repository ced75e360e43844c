//! A real process, really killed.

use crate::sample::{append, reading, record, run, sensors};
use std::fs;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;
use wattle_store::RunDir;

const FOLDER: &str = "WATTLE_STORE_KILL";

/// The process that is killed: writes records and readings until the end of the world.
#[test]
#[ignore = "runs only as the child of the test below"]
fn child() {
    let run = RunDir::open(std::env::var_os(FOLDER).unwrap()).unwrap();
    let _lock = run.lock().unwrap();
    let mut log = run.log().unwrap();
    let mut readings = run.readings(0, &sensors()).unwrap();
    for i in 0.. {
        (0..10).for_each(|j| readings.push(&reading(10 * i + j)).unwrap());
        readings.flush().unwrap();
        append(&mut log, record(i));
    }
}

#[test]
fn a_killed_process_loses_nothing_it_had_finished_and_blocks_nobody() {
    let (_parent, run) = run("r");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kill::child", "--ignored"])
        .env(FOLDER, run.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let log = run.path().join("log.jsonl");
    let mut waited = 0;
    while fs::metadata(&log).unwrap().len() < 200_000 {
        sleep(Duration::from_millis(5));
        waited += 1;
        assert!(waited < 12_000, "the child writes nothing");
    }
    assert!(run.lock().is_err());
    child.kill().unwrap();
    child.wait().unwrap();

    let _lock = run.lock().unwrap();
    let lines = fs::read(&log).unwrap().iter().filter(|b| **b == b'\n').count() as u64;
    let finished = run.finish().unwrap();
    assert_eq!(finished.records, lines);
    // Each record came after its ten readings were flushed.
    assert!(finished.readings >= 10 * lines && finished.readings <= 10 * (lines + 1), "{finished:?}");
    assert!(run.records().unwrap().zip(0..).all(|(r, i)| r.unwrap() == record(i)));
}
