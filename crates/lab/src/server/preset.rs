//! Servers that people have: one row each.

use wattle_core::registry::{self, About, Unknown};

/// Every preset there is.
pub const PRESETS: &[Preset] = &[
    Preset {
        name: "vllm",
        about: "vLLM: vllm serve MODEL; --model is a name on the hub or a folder",
        program: "vllm",
        variable: None,
        arguments: &["serve", "{model}", "--host", "{host}", "--port", "{port}"],
        environment: &[],
        client: "openai",
        health: "/health",
        served: Served::AsGiven,
    },
    Preset {
        name: "sglang",
        about: "SGLang: python3 -m sglang.launch_server; --model is a name on the hub or a folder",
        program: "python3",
        variable: None,
        arguments: &[
            "-m",
            "sglang.launch_server",
            "--model-path",
            "{model}",
            "--host",
            "{host}",
            "--port",
            "{port}",
        ],
        environment: &[],
        client: "openai",
        health: "/health",
        served: Served::AsGiven,
    },
    Preset {
        name: "llama-server",
        about: "llama.cpp: llama-server, or the program that LLAMA_SERVER names; --model is a GGUF file",
        program: "llama-server",
        variable: Some("LLAMA_SERVER"),
        arguments: &["-m", "{model}", "--alias", "{name}", "--host", "{host}", "--port", "{port}"],
        environment: &[],
        client: "openai",
        // It lists its model before that is loaded; only this says when it can be asked.
        health: "/health",
        served: Served::FileStem,
    },
    Preset {
        name: "ollama",
        about: "Ollama: ollama serve; --model is a name of its library",
        program: "ollama",
        variable: None,
        arguments: &["serve"],
        environment: &[("OLLAMA_HOST", "{host}:{port}")],
        client: "ollama",
        health: "/api/version",
        served: Served::AsGiven,
    },
];

/// How a known server is started and asked.
#[derive(Debug)]
pub struct Preset {
    /// The id users type.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    pub(super) program: &'static str,
    /// The environment variable that may name another program.
    variable: Option<&'static str>,
    /// Its arguments, with placeholders.
    pub(super) arguments: &'static [&'static str],
    /// What it is told by variables, with placeholders.
    pub(super) environment: &'static [(&'static str, &'static str)],
    /// The client that speaks with it.
    pub client: &'static str,
    /// What answers 200 once the model is loaded.
    pub(super) health: &'static str,
    pub(super) served: Served,
}

/// What a server calls its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Served {
    /// By the name it was given.
    AsGiven,
    /// By the file's name without its folder and `.gguf`.
    FileStem,
}

impl Preset {
    /// The preset called `name`.
    pub(super) fn find(name: &str) -> Result<&'static Preset, Unknown> {
        registry::find("preset", PRESETS, |p| About { name: p.name, about: p.about, options: &[] }, name)
    }

    /// The program that the environment, read by `variable`, names instead.
    pub(super) fn named(&self, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
        self.variable.and_then(variable).filter(|path| !path.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_says_where_it_listens() {
        for preset in PRESETS {
            let said = preset.arguments.join(" ");
            let told: Vec<&str> = preset.environment.iter().map(|(_, value)| *value).collect();
            let all = format!("{said} {}", told.join(" "));
            assert!(all.contains("{host}") && all.contains("{port}"), "{}: {all}", preset.name);
        }
    }

    #[test]
    fn a_variable_may_name_the_program() {
        let llama = Preset::find("llama-server").unwrap();
        assert_eq!(llama.named(|_| None), None);
        assert_eq!(llama.named(|_| Some(String::new())), None);
        let named = |name: &str| (name == "LLAMA_SERVER").then(|| "/opt/llama-server".to_owned());
        assert_eq!(llama.named(named).as_deref(), Some("/opt/llama-server"));
        assert_eq!(Preset::find("vllm").unwrap().named(named), None);
    }

    #[test]
    fn a_wrong_preset_is_told_with_the_nearest_right_one() {
        let error = Preset::find("llama_server").unwrap_err().to_string();
        assert!(error.contains("did you mean \"llama-server\"?"), "{error}");
    }
}
