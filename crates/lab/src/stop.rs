//! The wish to stop, shared by whoever catches signals and whoever must end in good order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use tokio::sync::Notify;

/// Why a run was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopCause {
    /// Ctrl-C.
    Interrupt,
    /// A polite kill.
    Terminate,
}

/// A switch that is pressed at most once and seen by all its clones.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<State>);

#[derive(Debug, Default)]
struct State {
    cause: AtomicU8,
    hurry: AtomicBool,
    pressed: Notify,
}

impl Stop {
    /// Presses the switch.
    pub fn press(&self, cause: StopCause) {
        let code = match cause {
            StopCause::Interrupt => 1,
            StopCause::Terminate => 2,
        };
        self.0.cause.store(code, Ordering::Release);
        // Kept for a waiter that comes later, too.
        self.0.pressed.notify_one();
    }

    /// There is no time: whoever ends in good order ends at once now, and loses nothing.
    pub fn hurry(&self) {
        self.0.hurry.store(true, Ordering::Release);
    }

    /// Whether there is no time.
    pub fn hurries(&self) -> bool {
        self.0.hurry.load(Ordering::Acquire)
    }

    /// Whether it was pressed, and why.
    pub fn cause(&self) -> Option<StopCause> {
        match self.0.cause.load(Ordering::Acquire) {
            1 => Some(StopCause::Interrupt),
            2 => Some(StopCause::Terminate),
            _ => None,
        }
    }

    /// Waits until it is pressed; one waiter at a time.
    pub async fn wait(&self) -> StopCause {
        loop {
            if let Some(cause) = self.cause() {
                return cause;
            }
            self.0.pressed.notified().await;
        }
    }
}
