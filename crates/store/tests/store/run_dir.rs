//! Making, opening, locking.

use crate::sample::{info, run, summary};
use std::fs;
use tempfile::TempDir;
use wattle_core::summary::SCHEMA_VERSION;
use wattle_store::{RunDir, StoreError};

#[test]
fn an_existing_folder_is_never_overwritten() {
    let (parent, made) = run("r");
    let error = RunDir::create(&parent.path().join("runs"), "r").unwrap_err();
    assert!(matches!(error, StoreError::Exists { .. }));
    let path = made.path().display();
    assert_eq!(
        error.to_string(),
        format!(
            "{path} exists already; choose another --name, replace it with --overwrite, or go on with it by --resume"
        )
    );
    assert_eq!(made.info().unwrap(), info());
}

#[test]
fn a_run_cannot_be_made_below_a_file() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = RunDir::create(&file, "r").unwrap_err().to_string();
    assert!(error.starts_with(&format!("cannot make {}: ", file.display())), "{error}");
}

#[test]
fn a_folder_without_run_json_is_not_a_run() {
    let folder = TempDir::new().unwrap();
    for path in [folder.path().to_owned(), folder.path().join("nothing")] {
        let error = RunDir::open(&path).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "not a run folder: no run.json in {}; give the folder that \"wattle run\" or \"wattle exec\" printed",
                path.display()
            )
        );
    }
}

#[test]
fn a_newer_schema_is_refused_with_both_numbers() {
    let (_parent, run) = run("r");
    let path = run.path().join("run.json");
    let newer = SCHEMA_VERSION + 1;
    // Only the version is looked at: what else a newer one says need not make sense here.
    fs::write(&path, format!("{{\"schema_version\": {newer}, \"run_id\": []}}")).unwrap();
    let error = RunDir::open(run.path()).unwrap_err().to_string();
    assert!(
        error.contains(&format!("version {newer}")) && error.contains(&format!("version {SCHEMA_VERSION}")),
        "{error}"
    );
}

#[test]
fn a_damaged_run_json_is_named() {
    let (_parent, run) = run("r");
    fs::write(run.path().join("run.json"), "{\"schema_version\": 1,").unwrap();
    let error = RunDir::open(run.path()).unwrap_err().to_string();
    assert!(error.contains("run.json is damaged: EOF"), "{error}");
}

#[test]
fn what_is_written_about_a_run_reads_back_the_same() {
    let (_parent, run) = run("r");
    let opened = RunDir::open(run.path()).unwrap();
    assert_eq!(opened.info().unwrap(), info());
    assert_eq!(opened.summary().unwrap(), None);
    run.write_summary(&summary()).unwrap();
    assert_eq!(opened.summary().unwrap(), Some(summary()));
}

#[test]
fn two_locks_exclude_each_other() {
    let (_parent, run) = run("r");
    let first = run.lock().unwrap();
    let error = RunDir::open(run.path()).unwrap().lock().unwrap_err();
    assert!(matches!(error, StoreError::Locked { .. }), "{error}");
    assert!(matches!(run.clone().remove(), Err(StoreError::Locked { .. })));
    drop(first);
    // The file stays, and is not what locks.
    assert!(run.path().join(".lock").exists());
    run.lock().unwrap();
}

#[test]
fn a_removed_run_is_gone() {
    let (_parent, run) = run("r");
    let path = run.path().to_owned();
    run.remove().unwrap();
    assert!(!path.exists());
}
