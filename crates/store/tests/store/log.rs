//! The write-ahead log.

use crate::sample::{NOW, ODD, append, bare_record, events, record, run, run_of};
use serde_json::json;
use std::fs::{self, File};
use std::io::Write;
use wattle_core::Event;
use wattle_core::event::Line;
use wattle_core::record::{Record, Score};
use wattle_store::{RunDir, StoreError};

fn records(run: &RunDir) -> Vec<Record> {
    run.records().unwrap().map(Result::unwrap).collect()
}

#[test]
fn every_event_reads_back_as_it_was_written() {
    let (_parent, run) = run("r");
    let mut log = run.log().unwrap();
    for event in events() {
        log.append(NOW, &event).unwrap();
    }
    let mut read = Vec::new();
    let replay = run.replay(|line| read.push(line)).unwrap();
    assert_eq!(read, events().into_iter().map(|e| Line::new(NOW, e)).collect::<Vec<_>>());
    assert_eq!((replay.lines, replay.skipped, replay.torn), (events().len() as u64, 0, false));
    assert_eq!(replay.bytes, fs::metadata(run.path().join("log.jsonl")).unwrap().len());
}

#[test]
fn a_record_survives_the_log_to_the_last_bit() {
    let written: Vec<_> = (0..500).flat_map(|i| [record(2 * i), bare_record(2 * i + 1)]).collect();
    let (_parent, run) = run_of(written.clone());
    assert_eq!(records(&run), written);
}

#[test]
fn a_torn_last_line_costs_only_that_line() {
    let (_parent, run) = run_of([record(0), bare_record(1), record(2)]);
    let path = run.path().join("log.jsonl");
    let whole = fs::read(&path).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    for length in (0..=whole.len()).rev() {
        file.set_len(length as u64).unwrap();
        let lines = whole[..length].iter().filter(|b| **b == b'\n').count();
        let torn = length > 0 && whole[length - 1] != b'\n';
        let replay = run.replay(|_| {}).unwrap();
        assert_eq!((replay.lines, replay.torn), (lines as u64, torn), "cut at byte {length}");
        drop(run.log().unwrap());
        let kept = whole[..length].iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1);
        assert_eq!(fs::read(&path).unwrap(), &whole[..kept], "cut at byte {length}");
    }
}

#[test]
fn what_follows_a_torn_line_stands_on_its_own() {
    let (_parent, run) = run_of([record(0), record(1)]);
    let path = run.path().join("log.jsonl");
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    append(&mut run.log().unwrap(), record(2));
    assert_eq!(records(&run), [record(0), record(2)]);
}

#[test]
fn a_torn_line_longer_than_any_block_is_cut_off_whole() {
    let (_parent, run) = run_of([record(0)]);
    let path = run.path().join("log.jsonl");
    let whole = fs::read(&path).unwrap();
    let mut file = File::options().append(true).open(&path).unwrap();
    file.write_all(&vec![b'x'; 200_000]).unwrap();
    run.log().unwrap();
    assert_eq!(fs::read(&path).unwrap(), whole);
}

#[test]
fn a_line_nobody_knows_is_skipped_and_counted() {
    let (_parent, run) = run_of([record(0)]);
    let mut file = File::options().append(true).open(run.path().join("log.jsonl")).unwrap();
    for line in [
        r#"{"ts": 1.5, "type": "my_own", "x": [1, {}]}"#,
        r#"{"type": "warning", "warning": "of_a_later_version"}"#,
        r#"{"type": "event", "event": "\ud800 half a pair, as Python writes it"}"#,
    ] {
        writeln!(file, "{line}").unwrap();
    }
    append(&mut run.log().unwrap(), record(1));
    let replay = run.replay(|_| {}).unwrap();
    assert_eq!((replay.lines, replay.skipped), (5, 3));
    assert_eq!(records(&run).len(), 2);
}

#[test]
fn a_garbage_line_in_the_middle_is_named() {
    let record_without_item = r#"{"ts": "", "type": "record", "session": 0}"#;
    for garbage in ["}{", "[]", "{\"no\": \"type\"}", "\u{0}\u{0}", record_without_item] {
        let (_parent, run) = run_of([record(0)]);
        let path = run.path().join("log.jsonl");
        let mut file = File::options().append(true).open(&path).unwrap();
        writeln!(file, "{garbage}").unwrap();
        append(&mut run.log().unwrap(), record(1));
        let error = run.replay(|_| {}).unwrap_err();
        assert!(matches!(error, StoreError::Line { line: 2, .. }), "{error}");
        assert!(error.to_string().starts_with(&format!("{}, line 2: ", path.display())), "{error}");
        assert!(run.finish().is_err());
    }
}

#[test]
fn a_record_that_could_never_be_read_again_is_refused_at_once() {
    let (_parent, run) = run("r");
    let mut deep = json!(0);
    for _ in 0..126 {
        deep = json!([deep]);
    }
    let mut nested = record(1);
    nested.exchange.server = Some(deep);
    let not_a_number =
        Record { score: Some(Score { value: f64::NAN, scorer: "broken".into() }), ..record(0) };
    let mut log = run.log().unwrap();
    for bad in [not_a_number, nested] {
        let error = log.append(NOW, &Event::Record(Box::new(bad))).unwrap_err();
        assert!(matches!(error, StoreError::Unrepeatable { .. }), "{error}");
    }
    append(&mut log, record(2));
    assert_eq!(records(&run).len(), 1);
}

#[test]
fn the_same_query_twice_is_kept_once_and_counted() {
    let again = Record { session: 7, ..record(1) };
    let (_parent, run) = run_of([record(1), record(0), again, record(2)]);
    assert_eq!(records(&run), [record(1), record(0), record(2)]);
    let finished = run.finish().unwrap();
    assert_eq!((finished.records, finished.duplicates), (3, 1));
}

#[test]
fn a_running_log_can_be_followed() {
    let (_parent, run) = run("r");
    let mut log = run.log().unwrap();
    let mut lines = run.lines().unwrap();
    assert!(lines.next().is_none());
    append(&mut log, record(0));
    assert!(lines.next().unwrap().is_ok());
    assert!(lines.next().is_none());

    // A line that is seen half-written is waited for.
    let path = run.path().join("log.jsonl");
    let line = fs::read(&path).unwrap();
    let (head, tail) = line.split_at(line.len() / 2);
    let mut file = File::options().append(true).open(&path).unwrap();
    file.write_all(head).unwrap();
    assert!(lines.next().is_none());
    assert!(lines.so_far().torn);
    file.write_all(tail).unwrap();
    assert!(matches!(lines.next(), Some(Ok(Line { event: Event::Record(r), .. })) if *r == record(0)));
    assert!(!lines.so_far().torn);
}

#[test]
fn odd_text_is_one_line_and_comes_back() {
    let (_parent, run) = run("r");
    let mut log = run.log().unwrap();
    log.append(NOW, &Event::with(ODD, json!({ODD: ODD}))).unwrap();
    let text = fs::read_to_string(run.path().join("log.jsonl")).unwrap();
    assert_eq!(text.matches('\n').count(), 1);
    let mut seen = Vec::new();
    run.replay(|line| seen.push(line.event)).unwrap();
    assert_eq!(seen, [Event::with(ODD, json!({ODD: ODD}))]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_says_what_to_do() {
    let (_parent, run) = run("r");
    let path = run.path().join("log.jsonl");
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/dev/full", &path).unwrap();
    let error = run.log().unwrap().append(NOW, &Event::plain("x")).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "cannot write {}: No space left on device (os error 28); free some space, then go on with --resume {run}, \
             or sum up what there is with \"wattle report {run}\"; everything finished so far is kept",
            path.display(),
            run = run.path().display()
        )
    );
}
