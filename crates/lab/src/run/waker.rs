//! Waits for a moment as precisely as the system allows.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use tokio::net::unix::pipe::Receiver;
use wattle_core::time::Stamp;
use wattle_meter::{alarm, clock};

/// The one alarm of a load.
pub(super) struct Waker {
    /// Read like a pipe.
    alarm: Option<Receiver>,
    set: Option<Stamp>,
}

impl Waker {
    pub(super) fn new() -> Self {
        Self { alarm: alarm::open().and_then(Receiver::from_owned_fd_unchecked).ok(), set: None }
    }

    /// Returns at `at`, or never if there is none. May be dropped and asked again.
    pub(super) async fn wait(&mut self, at: Option<Stamp>) {
        let Some(at) = at else { return std::future::pending().await };
        let set = self.set.replace(at) == Some(at);
        match &self.alarm {
            Some(alarm) if set || alarm::set(alarm.as_fd(), at).is_ok() => ring(alarm).await,
            _ => {
                let left = at.since(clock::now()).get();
                tokio::time::sleep(std::time::Duration::from_secs_f64(left)).await;
            }
        }
        self.set = None;
    }
}

async fn ring(alarm: &Receiver) {
    while alarm.readable().await.is_ok() {
        match alarm.try_read(&mut [0; 8]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            _ => return,
        }
    }
}
