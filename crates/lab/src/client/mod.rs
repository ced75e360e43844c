//! Clients: whoever answers, asked the same way. One file each, and two adjacent lines here.

use crate::LabError;
use std::pin::Pin;
use std::time::Duration;
use wattle_core::exchange::{Exchange, Request};
use wattle_core::registry::{self, About, Params};
use wattle_core::sensor::DeviceKind;
use wattle_core::summary::ModelInfo;
use wattle_core::time::Stamp;

pub mod embedded;
mod openai;

/// Every client there is.
pub const DRIVERS: &[Driver] = &[embedded::DRIVER, openai::DRIVER];

/// How a client is found and opened.
pub struct Driver {
    /// Its name, one line, its options.
    pub about: About,
    /// Opens it; nothing is sent yet.
    pub open: fn(&Settings) -> Result<Box<dyn Client>, LabError>,
}

/// What a client is opened with.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Where its server is.
    pub url: Option<String>,
    /// The model, if the user named one.
    pub model: Option<String>,
    /// Its own options.
    pub params: Params,
    /// A request that takes longer has failed.
    pub timeout: Duration,
}

/// A future that a trait object can return.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Where a client's joules are drawn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In this process.
    Here,
    /// By another process on this host.
    ThisHost,
    /// On another host: this machine's joules are not charged to it.
    Elsewhere {
        /// Its name.
        host: String,
    },
}

/// Answers requests.
pub trait Client: Send + Sync {
    /// Where the work is done.
    fn place(&self) -> Place;

    /// The kind of device that does the work, where the client knows.
    fn worker(&self) -> Option<DeviceKind> {
        None
    }

    /// Whether it is there at all; asked before anything else.
    fn health(&self) -> BoxFuture<'_, Result<(), LabError>>;

    /// Makes the model ready and says what it is.
    fn prepare(&self) -> BoxFuture<'_, Result<ModelInfo, LabError>>;

    /// Sends one request that was due at `due`. Whatever goes wrong is an outcome of the exchange. Dropping the future cancels
    /// the request.
    fn send<'a>(&'a self, request: &'a Request, due: Stamp) -> BoxFuture<'a, Exchange>;

    /// Lets go of what it holds.
    fn close(&self) -> BoxFuture<'_, Result<(), LabError>>;
}

/// Opens the client called `name`.
pub fn open(name: &str, settings: &Settings) -> Result<Box<dyn Client>, LabError> {
    let driver = registry::find("client", DRIVERS, |d| d.about, name)?;
    driver.about.check("client", &settings.params)?;
    (driver.open)(settings)
}
