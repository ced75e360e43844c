//! Names that users choose from: what a driver is called, what options it takes, and the nearest match of a wrong name.

use std::collections::BTreeMap;

/// `key = value` pairs for a driver, as text.
pub type Params = BTreeMap<String, String>;

/// One option of a driver.
#[derive(Debug, Clone, Copy)]
pub struct Opt {
    /// Its key.
    pub key: &'static str,
    /// What it does, with its default.
    pub about: &'static str,
}

/// What a driver says about itself; `wattle list` and the errors below come from it.
#[derive(Debug, Clone, Copy)]
pub struct About {
    /// The id users type.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// The options it takes.
    pub options: &'static [Opt],
}

/// A name or option that nobody knows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unknown {
    /// No driver has this name.
    #[error("unknown {kind} \"{name}\"{}; {kind}s: {}", did_you_mean(.nearest), .known.join(", "))]
    Name {
        /// What was looked for: `dataset`, `client` …
        kind: &'static str,
        /// The name given.
        name: String,
        /// The closest there is.
        nearest: Option<String>,
        /// All there are.
        known: Vec<String>,
    },
    /// The driver takes no such option.
    #[error("{kind} \"{name}\" has no option \"{key}\"{}; options: {}", did_you_mean(.nearest), list_or_none(.known))]
    Option {
        /// What kind of driver it is.
        kind: &'static str,
        /// Its name.
        name: &'static str,
        /// The option given.
        key: String,
        /// The closest there is.
        nearest: Option<String>,
        /// All it takes.
        known: Vec<String>,
    },
}

fn did_you_mean(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or_else(String::new, |n| format!(", did you mean \"{n}\"?"))
}

fn list_or_none(known: &[String]) -> String {
    if known.is_empty() { "none".into() } else { known.join(", ") }
}

/// The known name most like `name`, if any is at all.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let folded = name.to_lowercase().replace('-', "_");
    known
        .into_iter()
        .map(|k| (strsim::jaro_winkler(&folded, &k.to_lowercase().replace('-', "_")), k))
        .filter(|(likeness, _)| *likeness > 0.7)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, k)| k)
}

/// The driver called `name` in `drivers`.
pub fn find<'a, D>(
    kind: &'static str,
    drivers: &'a [D],
    about: impl Fn(&D) -> About,
    name: &str,
) -> Result<&'a D, Unknown> {
    drivers.iter().find(|d| about(d).name == name).ok_or_else(|| {
        let known: Vec<String> = drivers.iter().map(|d| about(d).name.to_owned()).collect();
        Unknown::Name {
            kind,
            name: name.to_owned(),
            nearest: nearest(name, known.iter().map(String::as_str)).map(str::to_owned),
            known,
        }
    })
}

impl About {
    /// Refuses options this driver does not take.
    pub fn check(&self, kind: &'static str, params: &Params) -> Result<(), Unknown> {
        match params.keys().find(|k| !self.options.iter().any(|o| o.key == *k)) {
            None => Ok(()),
            Some(key) => Err(Unknown::Option {
                kind,
                name: self.name,
                key: key.clone(),
                nearest: nearest(key, self.options.iter().map(|o| o.key)).map(str::to_owned),
                known: self.options.iter().map(|o| o.key.to_owned()).collect(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRIVERS: &[About] = &[
        About { name: "builtin", about: "", options: &[] },
        About {
            name: "jsonl",
            about: "",
            options: &[Opt { key: "path", about: "" }, Opt { key: "prompt", about: "" }],
        },
    ];

    #[test]
    fn a_wrong_name_is_told_with_the_nearest_right_one() {
        let error = find("dataset", DRIVERS, |d| *d, "jsnl").unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown dataset \"jsnl\", did you mean \"jsonl\"?; datasets: builtin, jsonl"
        );
        let error = find("dataset", DRIVERS, |d| *d, "zzz").unwrap_err();
        assert_eq!(error.to_string(), "unknown dataset \"zzz\"; datasets: builtin, jsonl");
    }

    #[test]
    fn a_wrong_option_is_told_with_the_nearest_right_one() {
        let params = Params::from([("pth".into(), "a,b".into())]);
        let error = DRIVERS[1].check("dataset", &params).unwrap_err();
        assert_eq!(
            error.to_string(),
            "dataset \"jsonl\" has no option \"pth\", did you mean \"path\"?; options: path, prompt"
        );
        assert!(DRIVERS[1].check("dataset", &Params::from([("path".into(), "x".into())])).is_ok());
    }
}
