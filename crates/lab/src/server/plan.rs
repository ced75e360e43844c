//! What is to be started and where it will be found: text read and checked, nothing started yet.

use super::preset::{Preset, Served};
use super::words::{Word, secret_in};
use crate::LabError;
use crate::exec::find;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;
use wattle_core::registry::{About, Opt, Params};
use wattle_core::spec::Spec;

/// What `server` takes.
pub const ABOUT: About = About {
    name: "managed",
    about: "a server that is started for the run and stopped after it",
    options: &[
        Opt {
            key: "command",
            about: "what to start; {port}, {host}, {model} and {env:NAME} are filled in, no shell is asked",
        },
        Opt { key: "preset", about: "or one that is known: vllm, sglang, llama-server, ollama" },
        Opt { key: "program", about: "the preset's program, by its name or its path (the preset's own)" },
        Opt { key: "args", about: "further arguments; secrets as {env:NAME}" },
        Opt { key: "port", about: "where it listens; 0 takes a free one (0)" },
        Opt {
            key: "health",
            about: "path that answers 200 once it can be asked (the preset's own, else the list of models)",
        },
        Opt { key: "ready_s", about: "how long it may take until then (600)" },
        Opt { key: "stop_s", about: "how long it may take to stop by itself before it is killed (10)" },
        Opt { key: "dir", about: "folder to start it in (the working folder)" },
    ],
};

/// The address that servers of ours listen at: nobody else is to ask them meanwhile.
const HOST: &str = "127.0.0.1";
const READY_S: f64 = 600.0;
const STOP_S: f64 = 10.0;
/// Somebody who listens on this machine answers sooner.
const KNOCK: Duration = Duration::from_secs(1);

/// What is to be started, with every placeholder filled in.
#[derive(Debug)]
pub(super) struct Plan {
    /// What it is called as, then its arguments.
    pub(super) words: Vec<Word>,
    pub(super) environment: Vec<(String, String)>,
    pub(super) dir: PathBuf,
    pub(super) host: String,
    pub(super) port: u16,
    /// What the client is told.
    pub(super) url: String,
    /// What the client calls the model; `None` leaves that to the server's own listing.
    pub(super) model: Option<String>,
    pub(super) health: Option<String>,
    /// Options of the client if it is one that asks for a list of models.
    pub(super) lists: Option<Params>,
    pub(super) ready: Duration,
    pub(super) stop: Duration,
}

impl Plan {
    /// What `spec` asks for; `None` if it asks for no server.
    pub(super) fn of(spec: &Spec) -> Result<Option<Plan>, LabError> {
        let options = &spec.server;
        if options.is_empty() {
            return Ok(None);
        }
        ABOUT.check("server", options)?;
        let preset = options.get("preset").map(|name| Preset::find(name)).transpose()?;
        let mut words = match (options.get("command"), preset) {
            (Some(_), None) if options.contains_key("program") => {
                return Err(usage("program is for a preset; the first word of a command is its program"));
            }
            (Some(command), None) => split("command", command)?,
            (None, Some(preset)) => {
                let arguments = preset.arguments.iter().map(|a| (*a).to_owned());
                let program = options.get("program").map_or(preset.program, String::as_str);
                [program.to_owned()].into_iter().chain(arguments).collect()
            }
            _ => return Err(usage("give either command or preset")),
        };
        words.extend(options.get("args").map(|args| split("args", args)).transpose()?.unwrap_or_default());
        if let Some(what) = secret_in(&words) {
            return Err(usage(&format!(
                "{what} is given in clear text, and the command is written to the run's files; put the secret into a variable of the environment and write {{env:NAME}} instead"
            )));
        }
        let environment: Vec<(String, String)> = preset
            .map_or(&[][..], |p| p.environment)
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let told = || words.iter().chain(environment.iter().map(|(_, value)| value));
        let uses = |placeholder: &str| told().any(|text| text.contains(placeholder));
        let (host, port) = address(spec, uses("{port}"))?;
        let given = spec.model.as_deref();
        if uses("{model}") && given.is_none() {
            return Err(usage("it is to be told the model, and none is named; give --model"));
        }
        let name = given.map(|model| match preset.map(|p| p.served) {
            Some(Served::FileStem) => stem(model),
            _ => model.to_owned(),
        });
        let value = |key: &str| match key {
            "port" => Some(port.to_string()),
            "host" => Some(host.clone()),
            "name" => Some(name.clone().unwrap_or_default()),
            "model" => Some(given.unwrap_or_default().to_owned()),
            _ => None,
        };
        let fill = |text: &String| {
            Word::fill(text, value, |name| std::env::var(name).ok()).map_err(|why| usage(&why))
        };
        let health = options.get("health").cloned().or(preset.map(|p| p.health.to_owned()));
        if health.as_ref().is_some_and(|path| !path.starts_with('/')) {
            return Err(usage("health is a path, and must begin with a slash"));
        }
        let dir = folder(options)?;
        let filled = words.iter().map(fill).collect::<Result<Vec<Word>, LabError>>()?;
        if filled.is_empty() {
            return Err(usage("the command is empty"));
        }
        let told = |(name, value): &(String, String)| Ok((name.clone(), fill(value)?.told));
        let openai = spec.client == "openai";
        let base = if openai { "/v1" } else { "" };
        Ok(Some(Plan {
            environment: environment.iter().map(told).collect::<Result<_, LabError>>()?,
            dir,
            url: spec.url.clone().unwrap_or_else(|| format!("http://{host}:{port}{base}")),
            // A command that is told a path or a name may call its model anything.
            model: name.filter(|_| preset.is_some() || !uses("{model}")),
            health,
            lists: openai.then(|| spec.client_param.clone()),
            ready: seconds(options, "ready_s", READY_S)?,
            stop: seconds(options, "stop_s", STOP_S)?,
            words: filled,
            host,
            port,
        }))
    }

    /// The file that is started.
    pub(super) fn program(&self) -> Result<PathBuf, LabError> {
        let found = find(self.words.first().map_or("", |word| word.told.as_str()), &self.dir);
        found.map_err(|e| LabError::Server(format!("cannot start the server: {e}")))
    }

    /// Refuses an address at which somebody else is heard: it would be their server that is measured.
    pub(super) fn check_free(&self) -> Result<(), LabError> {
        let Ok(mut found) = (self.host.as_str(), self.port).to_socket_addrs() else { return Ok(()) };
        match found.any(|address| TcpStream::connect_timeout(&address, KNOCK).is_ok()) {
            true => Err(LabError::Server(format!(
                "somebody already listens at {}:{}, and it would be that server that is measured; stop it, or leave out port and --url",
                self.host, self.port
            ))),
            false => Ok(()),
        }
    }

    /// The command for the log, without its secrets.
    pub(super) fn shown(&self) -> String {
        let words = || self.words.iter().map(|word| word.shown.as_str());
        shlex::try_join(words()).unwrap_or_else(|_| words().collect::<Vec<_>>().join(" "))
    }
}

fn usage(why: &str) -> LabError {
    LabError::Usage(format!("server: {why}; see docs/guide.md#server"))
}

fn split(key: &str, text: &str) -> Result<Vec<String>, LabError> {
    shlex::split(text).ok_or_else(|| usage(&format!("{key} has a quote that is never closed: {text}")))
}

fn stem(model: &str) -> String {
    Path::new(model).file_stem().map_or_else(|| model.to_owned(), |s| s.to_string_lossy().into_owned())
}

fn folder(options: &Params) -> Result<PathBuf, LabError> {
    let here = std::env::current_dir()
        .map_err(|error| LabError::System { what: "cannot find the working folder", error })?;
    let dir = options.get("dir").map_or(here.clone(), |dir| here.join(dir));
    match dir.is_dir() {
        true => Ok(dir),
        false => Err(usage(&format!("dir {} is no folder", dir.display()))),
    }
}

fn seconds(options: &Params, key: &str, usual: f64) -> Result<Duration, LabError> {
    let Some(text) = options.get(key) else { return Ok(Duration::from_secs_f64(usual)) };
    match text.parse::<f64>().ok().filter(|s| (0.0..=86_400.0).contains(s)) {
        Some(seconds) => Ok(Duration::from_secs_f64(seconds)),
        None => Err(usage(&format!("{key} is \"{text}\", and must be a number of seconds up to 86400"))),
    }
}

/// Where the server will be: as the user says, or at a port that nobody has.
fn address(spec: &Spec, told: bool) -> Result<(String, u16), LabError> {
    let port = match spec.server.get("port").map(String::as_str) {
        None | Some("0") => None,
        Some(text) => {
            let port = text.parse::<u16>().map_err(|_| usage(&format!("port is \"{text}\", not a port")))?;
            Some(port)
        }
    };
    match &spec.url {
        Some(url) => {
            let bad = || usage(&format!("--url {url} names no host"));
            let uri: hyper::Uri = url.parse().map_err(|_| bad())?;
            let host = uri.host().ok_or_else(bad)?.trim_matches(['[', ']']).to_owned();
            let usual = if uri.scheme_str() == Some("https") { 443 } else { 80 };
            let at = uri.port_u16().unwrap_or(usual);
            match port.filter(|port| *port != at) {
                Some(port) => Err(usage(&format!(
                    "port {port} and --url {url} are two addresses; leave out one, or let them agree"
                ))),
                None => Ok((host, at)),
            }
        }
        None if !told && port.is_none() => Err(usage(
            "the command does not say {port}, so nobody knows where it listens; write {port} where it takes one, or give port or --url",
        )),
        None => Ok((HOST.to_owned(), port.map_or_else(free_port, Ok)?)),
    }
}

fn free_port() -> Result<u16, LabError> {
    let bound = TcpListener::bind((HOST, 0)).and_then(|listener| listener.local_addr());
    bound.map(|a| a.port()).map_err(|error| LabError::System { what: "cannot find a free port", error })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(options: &[(&str, &str)]) -> Spec {
        let server = options.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Spec { server, client: "openai".into(), ..Spec::default() }
    }

    fn plan(spec: &Spec) -> Plan {
        Plan::of(spec).unwrap().unwrap()
    }

    fn refused(spec: &Spec) -> String {
        Plan::of(spec).unwrap_err().to_string()
    }

    #[test]
    fn words_are_split_before_they_are_filled_in_and_no_shell_is_asked() {
        let spec = Spec {
            model: Some("a b/{port}.gguf".into()),
            ..spec(&[
                ("command", r#"sh -c 'serve "$0"' {model} --at {host}:{port} {"json":1}"#),
                ("args", "-x 'y z'"),
            ])
        };
        let plan = plan(&spec);
        let port = plan.port.to_string();
        let at = format!("127.0.0.1:{port}");
        let told: Vec<&str> = plan.words.iter().map(|word| word.told.as_str()).collect();
        assert_eq!(
            told,
            ["sh", "-c", "serve \"$0\"", "a b/{port}.gguf", "--at", &at, "{json:1}", "-x", "y z"]
        );
        assert_eq!(plan.url, format!("http://127.0.0.1:{port}/v1"));
        assert_eq!(plan.model, None, "the server may call it otherwise");
        assert!(plan.program().unwrap().is_absolute());
        let word = Word { told: "no-such-program".into(), shown: String::new() };
        let none = super::Plan { words: vec![word], ..plan };
        assert!(none.program().unwrap_err().to_string().contains("no such program"));
    }

    #[test]
    fn no_server_is_asked_for_by_no_option() {
        assert!(Plan::of(&Spec::default()).unwrap().is_none());
    }

    #[test]
    fn a_wrong_option_is_told_with_the_nearest_right_one() {
        let error = refused(&spec(&[("comand", "sh {port}")]));
        assert!(error.contains("did you mean \"command\"?"), "{error}");
        for (options, text) in [
            (&[("command", "sh {port}"), ("preset", "vllm")][..], "either command or preset"),
            (&[("args", "x")], "either command or preset"),
            (&[("command", "sh '{port}")], "never closed"),
            (&[("command", "sh {port}"), ("port", "70000")], "not a port"),
            (&[("command", "sh {port}"), ("ready_s", "soon")], "ready_s"),
            (&[("command", "sh {port}"), ("stop_s", "-1")], "stop_s"),
            (&[("command", "sh {port}"), ("dir", "/no/such/folder")], "no folder"),
            (&[("command", "sh {port} {model}")], "--model"),
            (&[("command", "sh {port}"), ("health", "health")], "begin with a slash"),
            (&[("command", " "), ("port", "1")], "empty"),
            (&[("command", "sh")], "{port}"),
            (&[("command", "sh {port}"), ("program", "x")], "for a preset"),
            (&[("command", "sh {port} {env:WATTLE_NO_SUCH}")], "no variable WATTLE_NO_SUCH"),
            (&[("command", "sh {port}"), ("args", "--api-key sk-1")], "--api-key is given in clear text"),
            (&[("command", "sh {port} --hf-token=hf_1")], "{env:NAME}"),
        ] {
            let error = refused(&spec(options));
            assert!(error.contains(text), "{options:?}: {error}");
        }
    }

    #[test]
    fn a_command_that_cannot_be_told_a_port_is_found_where_the_user_says() {
        let at = plan(&spec(&[("command", "sh"), ("port", "8123")]));
        assert_eq!((at.port, at.url.as_str()), (8123, "http://127.0.0.1:8123/v1"));
        let url = Some("http://localhost:8124/x/v1".to_owned());
        let at = plan(&Spec { url: url.clone(), ..spec(&[("command", "sh {host}")]) });
        assert_eq!((at.port, at.host.as_str(), Some(at.url)), (8124, "localhost", url));
    }

    #[test]
    fn an_address_in_use_is_refused() {
        let taken = TcpListener::bind((HOST, 0)).unwrap();
        let port = taken.local_addr().unwrap().port().to_string();
        let busy = plan(&spec(&[("command", "sh"), ("port", &port)]));
        assert!(busy.check_free().unwrap_err().to_string().contains("already listens"));
        assert!(plan(&spec(&[("command", "sh {port}")])).check_free().is_ok());
    }

    #[test]
    fn two_addresses_are_refused() {
        let url = Some("http://localhost:8124/v1".to_owned());
        let at = |port: &str| Spec { url: url.clone(), ..spec(&[("command", "sh"), ("port", port)]) };
        assert!(refused(&at("8123")).contains("two addresses"));
        assert_eq!((plan(&at("8124")).port, plan(&at("0")).port), (8124, 8124));
    }

    #[test]
    fn secrets_are_told_and_not_shown() {
        // Any variable that there always is.
        let path = std::env::var("PATH").unwrap();
        let plan = plan(&spec(&[("command", "sh --api-key {env:PATH} 'a b'"), ("port", "1")]));
        assert_eq!(plan.words[2].told, path);
        assert_eq!(plan.shown(), "sh --api-key '{env:PATH}' 'a b'");
        assert!(!format!("{plan:?}").contains(&path));
    }

    #[test]
    fn a_preset_may_be_told_its_program() {
        let spec = Spec {
            model: Some("m".into()),
            ..spec(&[("preset", "vllm"), ("program", "/opt/venv/bin/vllm")])
        };
        assert!(plan(&spec).shown().starts_with("/opt/venv/bin/vllm serve m --host"));
    }
}
