//! Where calibrations are kept, and which of them is of a run's own model, engine and device.

use crate::LabError;
use crate::dataset::hex;
use crate::metering::Metering;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use wattle_core::calibration::{CALIBRATION_VERSION, Calibration, Subject};
use wattle_core::sensor::Device;
use wattle_core::spec::Spec;
use wattle_core::summary::{ModelInfo, slug};
use wattle_store::write_json;

/// Names the folder.
const VARIABLE: &str = "WATTLE_CALIBRATIONS";
/// As long as it takes to tell subjects apart.
const DIGITS: usize = 12;

/// What a run of this model with these sensors is of; `None` without energy.
pub(crate) fn subject(model: &ModelInfo, metering: &Metering) -> Option<Subject> {
    let panel = metering.panel.as_ref()?;
    let sensors = metering.sensors();
    let mut devices: Vec<Device> =
        panel.sensors.iter().map(|id| sensors[usize::from(id.0)].device.clone()).collect();
    devices.sort_by(|a, b| a.id.cmp(&b.id));
    Some(Subject {
        model: model.name.clone(),
        sha256: model.sha256.clone(),
        format: model.format.clone(),
        engine: model.engine.clone(),
        devices,
        perimeter: panel.perimeter,
    })
}

/// SHA-256 of a subject.
pub(super) fn digest(subject: &Subject) -> String {
    // A struct of plain fields is always written in their order.
    hex(&Sha256::digest(serde_json::to_vec(subject).unwrap_or_default()))
}

/// The folder of calibrations: `$WATTLE_CALIBRATIONS`, else `wattle/calibrations` where this user's programs keep their data.
pub fn folder() -> Option<PathBuf> {
    let path = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let data =
        || path("XDG_DATA_HOME").filter(|p| p.is_absolute()).or(Some(path("HOME")?.join(".local/share")));
    path(VARIABLE).or_else(|| Some(data()?.join("wattle/calibrations")))
}

/// Every calibration in a folder that can be read, newest first.
pub fn list(folder: &Path) -> Vec<(PathBuf, Calibration)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let files = entries.filter(|p| p.extension().is_some_and(|e| e == "json"));
    let mut all: Vec<_> = files.filter_map(|path| Some((read(&path).ok()?, path))).collect();
    all.sort_by(|(a, x), (b, y)| (&b.created, x).cmp(&(&a.created, y)));
    all.into_iter().map(|(calibration, path)| (path, calibration)).collect()
}

/// The newest calibration of a subject.
pub fn find(subject: &Subject) -> Option<Calibration> {
    let digest = digest(subject);
    let all = list(&folder()?);
    all.into_iter().map(|(_, c)| c).find(|c| c.digest == digest && c.subject == *subject)
}

/// Reads a calibration file.
pub fn read(path: &Path) -> Result<Calibration, LabError> {
    let wrong = |why: String| LabError::Usage(format!("{}: {why}", path.display()));
    let text = std::fs::read(path).map_err(|e| wrong(format!("cannot be read: {e}")))?;
    let none =
        |e: serde_json::Error| wrong(format!("is no calibration ({e}); make one with \"wattle calibrate\""));
    let version: Version = serde_json::from_slice(&text).map_err(none)?;
    match version.calibration_version {
        CALIBRATION_VERSION => serde_json::from_slice(&text).map_err(none),
        other => Err(wrong(format!(
            "is a calibration of version {other}, and this wattle reads version {CALIBRATION_VERSION}; calibrate again"
        ))),
    }
}

#[derive(serde::Deserialize)]
struct Version {
    calibration_version: u32,
}

/// The calibration that `--calibration` means for a subject: `auto`, `none`, or a file, which must be of it.
pub(crate) fn chosen(asked: &str, subject: &Subject) -> Result<Option<Calibration>, LabError> {
    match asked {
        "none" => Ok(None),
        "auto" => Ok(find(subject)),
        file => {
            let calibration = read(Path::new(file))?;
            match calibration.subject.difference(subject) {
                None => Ok(Some(calibration)),
                Some((what, then, now)) => Err(LabError::Usage(format!(
                    "{file} is a calibration of something else: its {what} is {then}, and that of this run is {now}; calibrate this one, or leave out --calibration"
                ))),
            }
        }
    }
}

/// The call that calibrates what a run of `spec` asks.
pub(crate) fn command(spec: &Spec, model: &str) -> String {
    let mut words = vec!["wattle".to_owned(), "calibrate".into(), "--client".into(), spec.client.clone()];
    let mut add = |flag: &str, value: String| words.extend([format!("--{flag}"), value]);
    spec.url.iter().for_each(|url| add("url", url.clone()));
    add("model", spec.model.clone().unwrap_or_else(|| model.to_owned()));
    for (flag, params) in
        [("client-param", &spec.client_param), ("server", &spec.server), ("source-param", &spec.source_param)]
    {
        params.iter().for_each(|(key, value)| add(flag, format!("{key}={value}")));
    }
    spec.source.iter().for_each(|source| add("source", source.clone()));
    spec.root.iter().for_each(|root| add("root", root.clone()));
    let quoted = words.iter().map(|w| shlex::try_quote(w).map_or_else(|_| w.clone(), |q| q.into_owned()));
    quoted.collect::<Vec<_>>().join(" ")
}

/// Whether there will be a place for the result, which is better known before than after.
pub(super) fn check(out: Option<&Path>) -> Result<(), LabError> {
    let folder = place(out)?.0;
    std::fs::create_dir_all(&folder).map_err(|e| {
        LabError::Calibrate(format!(
            "cannot make the folder {}: {e}; name another with --out or {VARIABLE}",
            folder.display()
        ))
    })
}

/// Keeps it: in the usual folder, in another one, or as a file.
pub(super) fn save(calibration: &Calibration, out: Option<&Path>) -> Result<PathBuf, LabError> {
    let (folder, file) = place(out)?;
    let usual = || {
        let digest = &calibration.digest[..DIGITS.min(calibration.digest.len())];
        format!("{}_{digest}.json", slug(&calibration.subject.model, 60)).into()
    };
    let path = folder.join(file.unwrap_or_else(usual));
    write_json(path.clone(), calibration)?;
    Ok(path)
}

/// A folder, and the name of the file, if it was given.
fn place(out: Option<&Path>) -> Result<(PathBuf, Option<PathBuf>), LabError> {
    match out {
        Some(file) if file.extension().is_some_and(|e| e == "json") && !file.is_dir() => {
            let name = file.file_name().map(PathBuf::from);
            let parent = file.parent().filter(|p| !p.as_os_str().is_empty());
            Ok((parent.unwrap_or(Path::new(".")).to_owned(), name))
        }
        Some(folder) => Ok((folder.to_owned(), None)),
        None => folder().map(|folder| (folder, None)).ok_or_else(|| {
            LabError::Usage(format!(
                "there is no home folder to keep calibrations in; name one with --out or {VARIABLE}"
            ))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_call_that_calibrates_has_the_flags_of_the_run() {
        let mut spec =
            Spec { client: "openai".into(), url: Some("http://127.0.0.1:1/v1".into()), ..Spec::default() };
        spec.source = vec!["nvml".into()];
        spec.client_param.insert("body".into(), r#"{"top_p":0.9}"#.into());
        assert_eq!(
            command(&spec, "org/model"),
            r#"wattle calibrate --client openai --url http://127.0.0.1:1/v1 --model org/model --client-param 'body={"top_p":0.9}' --source nvml"#
        );
    }

    #[test]
    fn a_result_goes_to_a_file_or_a_folder() {
        let place = |text: &str| place(Some(Path::new(text))).unwrap();
        assert_eq!(place("a/b.json"), ("a".into(), Some("b.json".into())));
        assert_eq!(place("b.json"), (".".into(), Some("b.json".into())));
        assert_eq!(place("a/b"), ("a/b".into(), None));
    }

    #[test]
    fn what_is_no_calibration_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        std::fs::write(&path, "{}").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("is no calibration"));
        std::fs::write(&path, r#"{"calibration_version": 99}"#).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("version 99"));
        assert!(list(dir.path()).is_empty());
        assert!(list(&dir.path().join("nowhere")).is_empty());
    }
}
