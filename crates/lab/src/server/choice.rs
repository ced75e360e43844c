//! Who answers, where the user left that open: decided once, so that `run.json` says it and a resumed run does the same.

use super::preset::Preset;
use crate::LabError;
use crate::client::embedded;
use crate::exec::find;
use std::path::Path;
use wattle_core::registry::Params;
use wattle_core::spec::Spec;

/// The client that is meant where none is named.
const USUAL: &str = "embedded";
/// The client of a server that no preset knows.
const SPOKEN: &str = "openai";
const LLAMA: &str = "llama-server";

/// What there is to choose from.
struct Means<'a> {
    /// Whether the embedded engine can run a file, or why not.
    fits: &'a dyn Fn(&str) -> Result<(), String>,
    /// Whether there is a llama-server to be started.
    llama: &'a dyn Fn() -> bool,
}

/// The spec with its client and its server settled.
pub(crate) fn settle(spec: Spec) -> Result<Spec, LabError> {
    let variable = |name: &str| std::env::var(name).ok();
    let llama = || {
        let program = Preset::find(LLAMA).map(|p| p.named(variable).unwrap_or_else(|| p.program.to_owned()));
        program.is_ok_and(|program| find(&program, Path::new(".")).is_ok())
    };
    let mut spec = choose(spec, &Means { fits: &embedded::fits, llama: &llama })?;
    fix_paths(&mut spec.server, variable)?;
    Ok(spec)
}

/// What is named by a relative path, or by a variable of today's environment, is to be found again.
fn fix_paths(server: &mut Params, variable: impl Fn(&str) -> Option<String>) -> Result<(), LabError> {
    if server.is_empty() {
        return Ok(());
    }
    let preset = server.get("preset").map(|name| Preset::find(name)).transpose()?;
    let program = server.get("program").cloned().or_else(|| preset?.named(variable));
    if let Some(program) = program {
        // Who is not found is told when it is to be started.
        let found = find(&program, Path::new(".")).ok();
        let path = found.and_then(|path| std::path::absolute(path).ok());
        server.insert("program".into(), path.map_or(program, |path| path.display().to_string()));
    }
    if let Ok(dir) = std::path::absolute(server.get("dir").map_or(".", String::as_str)) {
        server.insert("dir".into(), dir.display().to_string());
    }
    Ok(())
}

fn choose(mut spec: Spec, means: &Means<'_>) -> Result<Spec, LabError> {
    if spec.client != USUAL {
        return Ok(spec);
    }
    if !spec.server.is_empty() {
        let preset = spec.server.get("preset").map(|name| Preset::find(name)).transpose()?;
        spec.client = preset.map_or(SPOKEN, |p| p.client).into();
        return Ok(spec);
    }
    let file = spec.model.as_deref().filter(|m| m.ends_with(".gguf") && spec.url.is_none());
    let Some((file, why)) = file.and_then(|file| Some((file, (means.fits)(file).err()?))) else {
        return Ok(spec);
    };
    if !(means.llama)() {
        return Err(LabError::Client(format!(
            "model {file}: {why}; install llama.cpp, so that there is a llama-server on PATH or at LLAMA_SERVER and wattle starts it, or start a server with this model and give --client openai --url http://127.0.0.1:8080"
        )));
    }
    spec.client = SPOKEN.into();
    spec.server.insert("preset".into(), LLAMA.into());
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(spec: Spec, fits: bool, llama: bool) -> Result<(String, Params), String> {
        let fits = |_: &str| if fits { Ok(()) } else { Err("not byte-level".to_owned()) };
        let means = Means { fits: &fits, llama: &|| llama };
        choose(spec, &means).map(|s| (s.client, s.server)).map_err(|e| e.to_string())
    }

    fn params(key: &str, value: &str) -> Params {
        Params::from([(key.to_owned(), value.to_owned())])
    }

    fn of_model(model: &str) -> Spec {
        Spec { model: Some(model.into()), ..Spec::default() }
    }

    #[test]
    fn a_file_that_the_engine_cannot_run_goes_to_a_llama_server() {
        let got = chosen(of_model("a/smol.gguf"), false, true);
        assert_eq!(got, Ok(("openai".into(), params("preset", "llama-server"))));
    }

    #[test]
    fn without_a_llama_server_both_ways_out_are_told() {
        let error = chosen(of_model("a/smol.gguf"), false, false).unwrap_err();
        for part in
            ["a/smol.gguf", "not byte-level", "install llama.cpp", "LLAMA_SERVER", "--client openai --url"]
        {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn what_the_engine_can_run_stays_with_it() {
        let embedded = Ok(("embedded".to_owned(), Params::new()));
        assert_eq!(chosen(of_model("a/tiny.gguf"), true, true), embedded);
        assert_eq!(chosen(of_model("demo-1m"), false, true), embedded, "no file");
        assert_eq!(chosen(Spec::default(), false, true), embedded);
        let asked = Spec { url: Some("http://x".into()), ..of_model("a.gguf") };
        assert_eq!(chosen(asked, false, true), embedded, "its own error says more");
    }

    #[test]
    fn the_client_follows_from_the_server_unless_the_user_chose() {
        let client = |spec: Spec| chosen(spec, true, true).map(|(client, _)| client);
        let of = |key: &str, value: &str| Spec { server: params(key, value), ..Spec::default() };
        assert_eq!(client(of("command", "x {port}")), Ok("openai".into()));
        assert_eq!(client(of("preset", "vllm")), Ok("openai".into()));
        assert_eq!(client(of("preset", "ollama")), Ok("ollama".into()));
        let chose = Spec { client: "openai".into(), ..of("preset", "ollama") };
        assert_eq!(client(chose), Ok("openai".into()));
        assert!(client(of("preset", "vlm")).unwrap_err().contains("did you mean \"vllm\"?"));
    }

    #[test]
    fn a_client_that_was_chosen_is_left_alone() {
        let spec = Spec { client: "openai".into(), ..of_model("a.gguf") };
        assert_eq!(chosen(spec, false, true), Ok(("openai".into(), Params::new())));
    }

    #[test]
    fn the_program_that_a_variable_names_is_written_down_for_a_resumed_run() {
        let fixed = |mut server: Params, program: &str| {
            fix_paths(&mut server, |_| Some(program.to_owned())).unwrap();
            server.get("program").cloned()
        };
        let sh = find("sh", Path::new(".")).unwrap().display().to_string();
        assert_eq!(fixed(params("preset", "llama-server"), "sh"), Some(sh.clone()));
        assert_eq!(fixed(params("preset", "llama-server"), "/no/such"), Some("/no/such".into()));
        assert_eq!(fixed(params("preset", "vllm"), "sh"), None, "it has no variable");
        assert_eq!(fixed(params("command", "x"), "sh"), None);
        let mut given = params("preset", "llama-server");
        given.insert("program".into(), sh.clone());
        assert_eq!(fixed(given, "true"), Some(sh), "who was chosen before stays");
    }
}
