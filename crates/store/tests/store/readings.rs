//! Raw telemetry: the stream while a session runs, the table afterwards.

use crate::sample::{reading, run, sensors};
use std::fs;
use std::path::PathBuf;
use wattle_core::{Reading, SensorId, Stamp};
use wattle_store::{RunDir, StoreError};

const BATCHES: u64 = 4;
const ROWS: u64 = 7;

/// A session with [`BATCHES`] of [`ROWS`], left open as a kill would leave it.
fn killed_session(run: &RunDir, session: u32) -> PathBuf {
    let mut writer = run.readings(session, &sensors()).unwrap();
    for batch in 0..BATCHES {
        for i in 0..ROWS {
            writer.push(&reading(batch * ROWS + i)).unwrap();
        }
        writer.flush().unwrap();
    }
    writer.push(&reading(99)).unwrap();
    run.path().join(format!("readings-{session}.arrows"))
}

fn stored(run: &RunDir) -> Vec<(u32, Reading)> {
    run.stored_readings().unwrap().map(Result::unwrap).collect()
}

fn expected(session: u32, rows: u64) -> Vec<(u32, Reading)> {
    (0..rows).map(|i| (session, reading(i))).collect()
}

#[test]
fn what_was_flushed_loads_while_the_session_runs_and_after_it() {
    let (_parent, run) = run("r");
    killed_session(&run, 0);
    assert_eq!(stored(&run), expected(0, BATCHES * ROWS));
    let finished = run.finish().unwrap();
    assert_eq!((finished.readings, finished.torn_streams), (BATCHES * ROWS, 0));
    assert!(!run.path().join("readings-0.arrows").exists());
    assert_eq!(stored(&run), expected(0, BATCHES * ROWS));
}

#[test]
fn a_torn_stream_costs_only_its_torn_batch() {
    let (_parent, run) = run("r");
    let path = killed_session(&run, 0);
    let file = fs::File::options().write(true).open(&path).unwrap();
    // Where each batch ends: 0 batches at the end of the header.
    let mut ends = vec![file.metadata().unwrap().len()];
    let mut batches = BATCHES;
    for length in (0..ends[0]).rev() {
        file.set_len(length).unwrap();
        let read = stored(&run);
        // As the file shrinks a batch goes at the first byte it lacks, and no other with it.
        if read.len() as u64 != batches * ROWS {
            batches -= 1;
            ends.push(length);
        }
        assert_eq!(read, expected(0, batches * ROWS), "cut at byte {length}");
    }
    assert_eq!(batches, 0);
    assert!(ends[1] == ends[0] - 1, "the last byte of the file belongs to the last batch");
}

#[test]
fn finishing_takes_the_whole_batches_of_a_torn_stream() {
    let whole = {
        let (_parent, run) = run("r");
        fs::read(killed_session(&run, 0)).unwrap()
    };
    for length in (0..whole.len()).step_by(191) {
        let (_parent, run) = run("r");
        fs::write(run.path().join("readings-0.arrows"), &whole[..length]).unwrap();
        let before = stored(&run);
        let finished = run.finish().unwrap();
        assert_eq!(finished.readings, before.len() as u64, "cut at byte {length}");
        assert_eq!(stored(&run), before, "cut at byte {length}");
    }
}

#[test]
fn sessions_join_one_table_and_each_is_in_it_once() {
    let (_parent, run) = run("r");
    let first = killed_session(&run, 0);
    let stream = fs::read(&first).unwrap();
    run.finish().unwrap();

    // As if killed after the table got its name and before the stream went.
    fs::write(&first, &stream).unwrap();
    let both = [expected(0, BATCHES * ROWS), expected(1, BATCHES * ROWS)].concat();
    killed_session(&run, 1);
    assert_eq!(stored(&run), both);
    assert_eq!(run.finish().unwrap().readings, 2 * BATCHES * ROWS);
    assert_eq!(stored(&run), both);
    assert!(!first.exists());

    fs::write(&first, &stream).unwrap();
    assert_eq!(run.finish().unwrap().readings, 2 * BATCHES * ROWS);
    assert!(!first.exists());
}

#[test]
fn a_session_number_with_readings_is_refused() {
    let (_parent, run) = run("r");
    killed_session(&run, 0);
    let taken = |session| matches!(run.readings(session, &sensors()), Err(StoreError::SessionTaken { .. }));
    assert!(taken(0));
    run.finish().unwrap();
    assert!(taken(0));

    // One that was killed before it read anything may be had again.
    drop(run.readings(1, &sensors()).unwrap());
    assert!(!taken(1));
    run.finish().unwrap();
    assert!(!taken(1));
}

#[test]
fn sessions_may_have_different_sensors() {
    let (_parent, run) = run("r");
    for (session, table) in [(0, sensors()), (1, sensors().into_iter().rev().collect())] {
        let mut writer = run.readings(session, &table).unwrap();
        writer.push(&Reading { sensor: SensorId(0), at: Stamp::from_nanos(1), value: Some(1.0) }).unwrap();
        writer.close().unwrap();
    }
    run.finish().unwrap();
    let sensors: Vec<u16> = stored(&run).iter().map(|(_, r)| r.sensor.0).collect();
    assert_eq!(sensors, [0, 2]);
}

#[test]
fn a_failed_read_is_null_and_a_sensor_that_says_nan_has_failed() {
    let (_parent, run) = run("r");
    let mut writer = run.readings(0, &sensors()).unwrap();
    for value in [None, Some(f64::NAN), Some(f64::INFINITY), Some(0.0)] {
        writer.push(&Reading { sensor: SensorId(0), at: Stamp::from_nanos(1), value }).unwrap();
    }
    writer.close().unwrap();
    run.finish().unwrap();
    let values: Vec<_> = stored(&run).iter().map(|(_, r)| r.value).collect();
    assert_eq!(values, [None, None, None, Some(0.0)]);
}

#[test]
fn a_sensor_that_is_not_in_the_table_is_refused() {
    let (_parent, run) = run("r");
    let mut writer = run.readings(0, &sensors()).unwrap();
    let stray = Reading { sensor: SensorId(3), at: Stamp::from_nanos(1), value: None };
    assert!(matches!(writer.push(&stray), Err(StoreError::NoSuchSensor { .. })));
}

#[test]
fn a_million_readings_pass_through_batches_and_row_groups() {
    let (_parent, run) = run("r");
    let mut writer = run.readings(0, &sensors()).unwrap();
    for i in 0..1_000_000 {
        writer.push(&reading(i)).unwrap();
    }
    writer.close().unwrap();
    assert_eq!(run.finish().unwrap().readings, 1_000_000);
    assert!(run.stored_readings().unwrap().map(Result::unwrap).eq((0..1_000_000).map(|i| (0, reading(i)))));
    let bytes = fs::metadata(run.path().join("readings.parquet")).unwrap().len();
    assert!(bytes < 12_000_000, "{bytes} bytes");
}

#[test]
fn a_damaged_stream_is_kept_and_named() {
    let (_parent, run) = run("r");
    let path = killed_session(&run, 0);
    let mut bytes = fs::read(&path).unwrap();
    bytes[8..200].fill(0xff);
    fs::write(&path, bytes).unwrap();
    let error = run.finish().unwrap_err();
    assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
    assert!(path.exists());
}
