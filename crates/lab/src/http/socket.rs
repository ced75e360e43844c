//! A TCP connection that knows when its bytes came, below TLS: the kernel's own stamps where it gives any.

use futures_util::FutureExt;
use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use wattle_core::exchange::Dated;
use wattle_core::time::Stamp;
use wattle_meter::{clock, receive};

/// When the last bytes of a connection came, and when a request was written to it.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    came: AtomicU64,
    by_kernel: AtomicBool,
    /// 0 until something is written.
    written: AtomicU64,
}

impl Traffic {
    /// The moment of the last bytes that came, and who says so.
    pub(super) fn came(&self) -> (Stamp, Dated) {
        let dated = if self.by_kernel.load(Ordering::Relaxed) { Dated::Kernel } else { Dated::Client };
        (Stamp::from_nanos(self.came.load(Ordering::Relaxed)), dated)
    }

    /// Forgets what was written before.
    pub(super) fn start(&self) {
        self.written.store(0, Ordering::Relaxed);
    }

    /// When the first bytes since [`Traffic::start`] were given to the kernel.
    pub(super) fn written(&self) -> Option<Stamp> {
        Some(self.written.load(Ordering::Relaxed)).filter(|at| *at > 0).map(Stamp::from_nanos)
    }

    fn writes(&self) {
        if self.written.load(Ordering::Relaxed) == 0 {
            self.written.store(clock::now().nanos(), Ordering::Relaxed);
        }
    }
}

/// The connection.
pub(super) struct Socket {
    tcp: TcpStream,
    traffic: Arc<Traffic>,
}

impl Socket {
    pub(super) fn new(tcp: TcpStream) -> (Self, Arc<Traffic>) {
        receive::ask_for_stamps(tcp.as_fd());
        let traffic = Arc::new(Traffic::default());
        (Self { tcp, traffic: Arc::clone(&traffic) }, traffic)
    }

    /// How many bytes wait to be read, as far as one can see at once; 0 if the other side has closed it, `None` if nothing came.
    pub(super) fn waiting(&self) -> Option<usize> {
        let mut byte = [0];
        self.tcp.peek(&mut byte).now_or_never().map(|peeked| peeked.unwrap_or(0))
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Socket { tcp, traffic } = self.get_mut();
        loop {
            ready!(tcp.poll_read_ready(cx))?;
            let room = buf.initialize_unfilled();
            match tcp.try_io(Interest::READABLE, || receive::receive(tcp.as_fd(), room)) {
                Ok((n, arrival)) => {
                    traffic.came.store(arrival.at.nanos(), Ordering::Relaxed);
                    traffic.by_kernel.store(arrival.by_kernel, Ordering::Relaxed);
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.traffic.writes();
        Pin::new(&mut self.get_mut().tcp).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.traffic.writes();
        Pin::new(&mut self.get_mut().tcp).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tcp).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tcp).poll_shutdown(cx)
    }
}
