//! The embedded engine: llama-architecture GGUF models with a byte-level vocabulary, run in this process by plain Rust on one
//! thread. It exists so that a measurement works with nothing installed; real models run on real servers.

mod error;
#[cfg(test)]
mod fixture;
mod generate;
mod gguf;
mod kernel;
mod model;
mod sample;
mod session;
mod vocab;

pub use error::EngineError;
pub use generate::{Finish, Generated, Options, Step, generate};
pub use model::{Info, Model};
pub use session::Session;
pub use vocab::Vocab;

use super::{BoxFuture, Client, Driver, Limits, Live, Place, Settings, Tell, Verdict};
use crate::LabError;
use crate::dataset::hex;
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use wattle_core::exchange::{self, FailureClass, Outcome, Request, TokensFrom, Usage};
use wattle_core::registry::{About, nearest};
use wattle_core::sensor::DeviceKind;
use wattle_core::summary::ModelInfo;
use wattle_core::wire::openai as wire;
use wattle_meter::clock;

/// A model that comes with the binary.
pub struct BuiltIn {
    /// The name users type.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// The GGUF file.
    pub bytes: &'static [u8],
}

/// Demonstration models, trained by `tools/demo-model` on short tasks. The first is the default.
pub const MODELS: &[BuiltIn] = &[
    BuiltIn {
        name: "demo-1m",
        about: "demonstration model, 0.9 M parameters, 8 bits",
        bytes: include_bytes!("../../../models/demo-1m-q8_0.gguf"),
    },
    BuiltIn {
        name: "demo-1m-q4",
        about: "the same with 4 bits",
        bytes: include_bytes!("../../../models/demo-1m-q4_0.gguf"),
    },
    BuiltIn {
        name: "demo-300k",
        about: "demonstration model, 0.36 M parameters, 8 bits",
        bytes: include_bytes!("../../../models/demo-300k-q8_0.gguf"),
    },
];

/// Byte-level models are small; a larger file is not one of them, and would be read in vain.
const LARGEST_FILE: u64 = 1 << 30;

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "embedded",
        about: "a small engine inside wattle, for its built-in models and GGUF files with a byte-level vocabulary",
        options: &[],
    },
    open: |settings| Ok(Box::new(Embedded::open(settings)?)),
};

struct Embedded {
    info: ModelInfo,
    limits: Limits,
    /// One session: one request at a time.
    session: Arc<Mutex<Session>>,
}

impl Embedded {
    fn open(settings: &Settings) -> Result<Self, LabError> {
        if settings.url.is_some() {
            return Err(LabError::Usage(
                "client \"embedded\" runs in this process and takes no --url; did you mean --client openai?"
                    .into(),
            ));
        }
        let name = settings.model.as_deref().unwrap_or(MODELS[0].name);
        let (name, bytes): (String, Cow<'static, [u8]>) = match MODELS.iter().find(|m| m.name == name) {
            Some(model) => (name.to_owned(), model.bytes.into()),
            None if name.ends_with(".gguf") || name.contains('/') => {
                let stem = Path::new(name).file_stem().unwrap_or_default().to_string_lossy().into_owned();
                (stem, read_file(name)?.into())
            }
            None => return Err(unknown_model(name)),
        };
        let model = Model::from_bytes(&bytes).map_err(|error| {
            let path = settings.model.as_deref().unwrap_or_default();
            let how = match error {
                EngineError::NotByteLevel { .. } => on_a_server(path),
                _ => String::new(),
            };
            LabError::Client(format!("model {path}: {error}{how}"))
        })?;
        let info = ModelInfo {
            name,
            parameters: Some(model.info().parameters),
            format: Some(model.info().format.clone()),
            sha256: Some(hex(&Sha256::digest(&bytes))),
            engine: Some(format!("wattle {}", env!("CARGO_PKG_VERSION"))),
        };
        let session = Arc::new(Mutex::new(Session::new(Arc::new(model))));
        Ok(Self { info, limits: settings.limits, session })
    }
}

/// Reads a model file, unless its size alone says that it is none of ours.
fn read_file(path: &str) -> Result<Vec<u8>, LabError> {
    let cannot = |e: std::io::Error| LabError::Client(format!("cannot read model {path}: {e}"));
    let size = std::fs::metadata(path).map_err(cannot)?.len();
    if size > LARGEST_FILE {
        let how = on_a_server(path);
        return Err(LabError::Client(format!(
            "model {path} has {} MB, too much for the embedded engine; run it on a server{how}",
            size / 1_000_000
        )));
    }
    std::fs::read(path).map_err(cannot)
}

/// Whether this engine can run the model in that file, or why it is one for a server. A file that cannot be read, or is no whole GGUF
/// file, is nobody's: opening it says more.
pub(crate) fn fits(path: &str) -> Result<(), String> {
    let size = std::fs::metadata(path).map_or(0, |m| m.len());
    if size > LARGEST_FILE {
        return Err(format!("{} MB are too much for the embedded engine", size / 1_000_000));
    }
    let Ok(bytes) = std::fs::read(path) else { return Ok(()) };
    match Model::from_bytes(&bytes) {
        Err(
            error @ (EngineError::NotByteLevel { .. }
            | EngineError::Metadata { .. }
            | EngineError::Tensor { .. }),
        ) => Err(error.to_string()),
        _ => Ok(()),
    }
}

fn on_a_server(path: &str) -> String {
    format!(
        ", for example \"llama-server -m {path} --port 8080\", and give --client openai --url http://127.0.0.1:8080"
    )
}

fn unknown_model(name: &str) -> LabError {
    let known = || MODELS.iter().map(|m| m.name);
    let meant = nearest(name, known()).map_or_else(String::new, |n| format!(", did you mean \"{n}\"?"));
    LabError::Usage(format!(
        "unknown model \"{name}\"{meant}; built-in models: {}; or a path to a .gguf file; or --client openai --url URL for a model on a server",
        known().collect::<Vec<_>>().join(", ")
    ))
}

impl Client for Embedded {
    fn place(&self) -> Place {
        Place::Here
    }

    fn worker(&self) -> Option<DeviceKind> {
        Some(DeviceKind::Cpu)
    }

    fn health(&self) -> BoxFuture<'_, Result<(), LabError>> {
        Box::pin(async { Ok(()) })
    }

    fn prepare<'a>(&'a self, _tell: Tell<'a>) -> BoxFuture<'a, Result<ModelInfo, LabError>> {
        Box::pin(async { Ok(self.info.clone()) })
    }

    fn send<'a>(&'a self, request: &'a Request, live: &'a Arc<Live>) -> BoxFuture<'a, Verdict> {
        Box::pin(async move {
            // Dropped with this future: tells the thread below to give up at its next token.
            let cancel = CancelOnDrop(Arc::new(AtomicBool::new(false)));
            let (session, request, exchange) = (Arc::clone(&self.session), request.clone(), Arc::clone(live));
            let cancelled = Arc::clone(&cancel.0);
            let work = tokio::task::spawn_blocking(move || answer(&session, &request, &exchange, &cancelled));
            match self.limits.hold(live, work).await {
                Ok(Ok(())) => {}
                Ok(Err(broken)) => live.ended(failed(format!("the engine broke: {broken}"))),
                Err(overdue) => live.ended(overdue),
            }
            Verdict::Final
        })
    }

    fn close(&self) -> BoxFuture<'_, Result<(), LabError>> {
        Box::pin(async { Ok(()) })
    }
}

struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn answer(session: &Mutex<Session>, request: &Request, live: &Live, cancelled: &AtomicBool) {
    // A panic in an earlier answer left nothing that a reset does not clear.
    let mut session = session.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if cancelled.load(Ordering::Relaxed) {
        return;
    }
    // One at a time: until now it had not been sent.
    live.sent(clock::now());
    let options = Options {
        max_tokens: request.max_tokens as usize,
        temperature: request.temperature as f32,
        top_k: 0,
        top_p: 1.0,
        seed: request.seed,
    };
    let mut bytes = Vec::new();
    let prompt = wire::as_text(&request.turns);
    let result = generate(&mut session, &prompt, &options, &mut |step| {
        if let Step::Token { byte, .. } = step {
            let now = clock::now();
            live.with(|exchange| {
                exchange.first_token.get_or_insert(now);
                exchange.tokens.push(now);
            });
            bytes.extend(byte);
        }
        if cancelled.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let generated = match result {
        Ok(generated) => generated,
        Err(error) => return live.ended(failed(error.to_string())),
    };
    let finish = match generated.finish {
        Finish::Stop => exchange::Finish::Stop,
        Finish::Length => exchange::Finish::Length,
        // Whoever gave up on it has said why.
        Finish::Cancelled => return,
    };
    live.with(|exchange| {
        exchange.usage = Usage {
            prompt: Some(generated.prompt_tokens as u64),
            completion: Some(generated.completion_tokens as u64),
            reasoning: None,
            cached: None,
            from: Some(TokensFrom::Usage),
        };
        exchange.answer = String::from_utf8_lossy(&bytes).into_owned();
    });
    live.ended(Outcome::Ok { finish });
}

fn failed(error: String) -> Outcome {
    Outcome::Failed { class: FailureClass::Engine, error }
}
