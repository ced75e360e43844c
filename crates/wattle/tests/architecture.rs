//! The rules of ARCHITECTURE.md that cargo alone does not keep: who may import whom, complete registries, a map that is true.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Direct dependencies of each crate of the workspace: normal ones, and dev ones.
fn dependencies() -> BTreeMap<String, (BTreeSet<String>, BTreeSet<String>)> {
    let out = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let metadata: Value = serde_json::from_slice(&out.stdout).unwrap();
    let names = |package: &Value, dev: bool| {
        let all = package["dependencies"].as_array().unwrap();
        all.iter()
            .filter(|d| (d["kind"] == "dev") == dev)
            .map(|d| d["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let packages = metadata["packages"].as_array().unwrap();
    packages
        .iter()
        .map(|p| (p["name"].as_str().unwrap().to_owned(), (names(p, false), names(p, true))))
        .collect()
}

/// What each crate may import of ours, and what it must never import.
const RULES: &[(&str, &[&str], &[&str])] = &[
    (
        "wattle-core",
        &[],
        &["tokio", "hyper", "arrow-array", "parquet", "clap", "rustix", "libloading", "anyhow", "axum"],
    ),
    ("wattle-meter", &["wattle-core"], &["tokio", "arrow-array", "parquet", "axum", "clap", "anyhow"]),
    ("wattle-store", &["wattle-core"], &["tokio", "hyper", "rustix", "libloading", "axum", "clap", "anyhow"]),
    (
        "wattle-lab",
        &["wattle-core", "wattle-meter", "wattle-store"],
        &["axum", "clap", "arrow-array", "parquet", "anyhow"],
    ),
    (
        "wattle-serve",
        &["wattle-core", "wattle-meter", "wattle-store"],
        &["clap", "arrow-array", "parquet", "anyhow"],
    ),
    (
        "wattle",
        &["wattle-core", "wattle-meter", "wattle-store", "wattle-lab", "wattle-serve"],
        &["tokio", "hyper", "arrow-array", "parquet", "libloading", "rustix"],
    ),
];

#[test]
fn no_crate_imports_what_it_must_not() {
    let all = dependencies();
    for (name, ours, never) in RULES {
        let (deps, _) = &all[*name];
        for dep in deps.iter().filter(|d| d.starts_with("wattle")) {
            assert!(ours.contains(&dep.as_str()), "{name} imports {dep}");
        }
        for dep in *never {
            assert!(!deps.contains(*dep), "{name} imports {dep}");
        }
    }
    for (name, (deps, _)) in &all {
        assert!(
            name.starts_with("wattle-sim-") || !deps.iter().any(|d| d.starts_with("wattle-sim-")),
            "{name} ships simulated hardware"
        );
        assert!(
            RULES.iter().any(|(n, _, _)| n == name) || name.starts_with("wattle-sim-"),
            "{name} is a crate without rules"
        );
    }
}

#[test]
fn only_named_files_hold_unsafe_code() {
    let mut found = BTreeSet::new();
    for path in sources(&root().join("crates")) {
        let text = std::fs::read_to_string(&path).unwrap();
        // `unsafe` as code: not in comments, and not as part of a lint's name.
        let code = text.lines().map(|l| l.split("//").next().unwrap_or_default());
        if code.flat_map(|l| l.split(|c: char| !c.is_alphanumeric() && c != '_')).any(|word| word == "unsafe")
        {
            found.insert(path.strip_prefix(root()).unwrap().display().to_string());
        }
    }
    let allowed = |path: &str| {
        path.starts_with("crates/meter/")
            || path.starts_with("crates/sim-")
            || path == "crates/lab/src/client/embedded/kernel.rs"
            || path == "crates/wattle/tests/architecture.rs"
    };
    let wrong: Vec<_> = found.iter().filter(|p| !allowed(p)).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn every_driver_file_is_registered() {
    for folder in ["meter/src/source", "lab/src/client", "lab/src/dataset", "lab/src/score", "lab/src/launch"]
    {
        let folder = format!("crates/{folder}");
        let registry = read(&format!("{folder}/mod.rs"));
        for entry in std::fs::read_dir(root().join(&folder)).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            if name == "mod" || path.is_dir() && !path.join("mod.rs").exists() {
                continue;
            }
            assert!(registry.contains(&format!("{name}::DRIVER")), "{folder}/{name} is not in DRIVERS");
        }
    }
}

#[test]
fn every_path_the_map_names_exists() {
    for document in ["ARCHITECTURE.md", "README.md", "docs/guide.md", "docs/method.md"] {
        let text = read(document);
        for word in text.split('`').skip(1).step_by(2) {
            let is_path = ["crates/", "docs/", "tools/", "scripts/", "fixtures/", "benches/", ".ci/"]
                .iter()
                .any(|p| word.starts_with(p));
            if is_path && !word.contains(['*', '<', ' ', '{']) {
                let path = word.split('#').next().unwrap_or(word);
                assert!(root().join(path).exists(), "{document} names {word}, which is not there");
            }
        }
    }
}

#[test]
fn every_link_of_the_readme_leads_somewhere() {
    let text = read("README.md");
    let links: Vec<&str> = text.split("](").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    assert!(links.len() >= 6);
    for link in links {
        let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
        let text = std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{link}: {e}"));
        let headings = text
            .lines()
            .filter(|l| l.starts_with('#'))
            .map(|l| l.trim_start_matches(['#', ' ']).to_lowercase().replace(' ', "-"));
        let there = anchor.is_empty() || text.contains(&format!("id=\"{anchor}\""));
        assert!(there || headings.into_iter().any(|h| h == anchor), "{link}");
    }
}

#[test]
fn the_map_names_every_crate_and_every_module() {
    let text = read("ARCHITECTURE.md");
    for (name, ..) in RULES {
        assert!(text.contains(&format!("`{name}`")), "{name}");
    }
    for krate in ["core", "meter", "store", "lab", "serve", "wattle"] {
        let line = text
            .lines()
            .find(|l| l.contains(&format!("── {krate}/src/")))
            .unwrap_or_else(|| panic!("{krate}"));
        for entry in std::fs::read_dir(root().join(format!("crates/{krate}/src"))).unwrap() {
            let name = entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned();
            let words: BTreeSet<&str> = line.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
            assert!(
                name == "lib" || words.contains(name.as_str()),
                "crates/{krate}/src/{name} is not on the map"
            );
        }
    }
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path);
            }
        }
    }
    found
}
