//! A TCP connection that knows when its bytes came, below TLS: the kernel's own stamps where it gives any.

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
use wattle_meter::receive;

/// When the last bytes of a connection came.
#[derive(Debug, Default)]
pub(super) struct Arrived {
    at: AtomicU64,
    by_kernel: AtomicBool,
}

impl Arrived {
    /// The moment, and who says so.
    pub(super) fn last(&self) -> (Stamp, Dated) {
        let dated = if self.by_kernel.load(Ordering::Relaxed) { Dated::Kernel } else { Dated::Client };
        (Stamp::from_nanos(self.at.load(Ordering::Relaxed)), dated)
    }
}

/// The connection.
pub(super) struct Socket {
    tcp: TcpStream,
    arrived: Arc<Arrived>,
}

impl Socket {
    pub(super) fn new(tcp: TcpStream) -> (Self, Arc<Arrived>) {
        receive::ask_for_stamps(tcp.as_fd());
        let arrived = Arc::new(Arrived::default());
        (Self { tcp, arrived: Arc::clone(&arrived) }, arrived)
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Socket { tcp, arrived } = self.get_mut();
        loop {
            ready!(tcp.poll_read_ready(cx))?;
            let room = buf.initialize_unfilled();
            match tcp.try_io(Interest::READABLE, || receive::receive(tcp.as_fd(), room)) {
                Ok((n, arrival)) => {
                    arrived.at.store(arrival.at.nanos(), Ordering::Relaxed);
                    arrived.by_kernel.store(arrival.by_kernel, Ordering::Relaxed);
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
        Pin::new(&mut self.get_mut().tcp).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
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
