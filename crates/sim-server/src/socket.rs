//! Sockets whose bytes come with the moment at which the kernel got them.
//!
//! A stamp taken after `read` returns tells when we had time, not when the request came. `SO_TIMESTAMPNS` gives the kernel's moment, by
//! `CLOCK_REALTIME`; it is put on the monotonic clock right away.
#![allow(unsafe_code, reason = "recvmsg with time stamps: rustix has them not")]

use crate::clock;
use std::io::{self, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

/// Connections that may wait to be accepted; std's 128 is too few for a benchmark that opens 2,000 at once.
const BACKLOG: i32 = 4096;

/// When bytes came.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Received {
    pub(crate) at: u64,
    /// Said by the kernel; else it is when we read them.
    pub(crate) by_kernel: bool,
}

/// A listener whose connections have stamps, if the kernel gives any.
pub(crate) fn listen(address: &str) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    rustix::net::listen(&listener, BACKLOG)?;
    // Connections inherit it. A kernel that refuses leaves us our own stamps, and the log says so.
    ask_for_stamps(listener.as_raw_fd());
    // The first socket that asks makes the kernel begin to stamp, which it does a little later.
    let _ = wait_for_stamps();
    Ok(listener)
}

/// Returns once a byte sent over loopback comes with a stamp, or never will.
fn wait_for_stamps() -> io::Result<()> {
    const TRIES: usize = 50;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    ask_for_stamps(listener.as_raw_fd());
    let mut near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    for _ in 0..TRIES {
        near.write_all(b"?")?;
        if receive(&far, &mut [0])?.1.by_kernel {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn ask_for_stamps(socket: RawFd) {
    let on: libc::c_int = 1;
    // SAFETY: the kernel reads one int, which lives until the call returns.
    unsafe {
        libc::setsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_TIMESTAMPNS,
            (&raw const on).cast(),
            size_of_val(&on) as libc::socklen_t,
        );
    }
}

/// Room for one control message with a `timespec`, aligned as control messages must be.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// Reads what there is. The moment is that of the last segment read.
pub(crate) fn receive(stream: &TcpStream, buffer: &mut [u8]) -> io::Result<(usize, Received)> {
    let mut control = Control([0; 64]);
    let mut piece = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: all-zero is a message header without address, pieces and control room; what it needs is set below.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len() as _;
    // SAFETY: the header points at a buffer and a control room that both live until the call returns.
    let read = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, 0) };
    if read < 0 {
        return Err(io::Error::last_os_error());
    }
    let received = match stamp(&message) {
        Some(wall_ns) => Received { at: clock::from_wall(wall_ns), by_kernel: true },
        None => Received { at: clock::now(), by_kernel: false },
    };
    Ok((read as usize, received))
}

/// Nanoseconds of wall time from the control messages.
fn stamp(message: &libc::msghdr) -> Option<u64> {
    // SAFETY: the kernel filled the header; the macros stay within its control room.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(message);
        while let Some(header) = next.as_ref() {
            if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_TIMESTAMPNS {
                let time = libc::CMSG_DATA(header).cast::<libc::timespec>().read_unaligned();
                return Some(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64);
            }
            next = libc::CMSG_NXTHDR(message, header);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stamp_is_of_the_arrival_and_not_of_the_read() {
        let listener = listen("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        listener.set_nonblocking(false).unwrap();
        let (server, _) = listener.accept().unwrap();
        let before = clock::now();
        client.write_all(b"hello").unwrap();
        let sent = clock::now();
        std::thread::sleep(Duration::from_millis(50));
        let (read, received) = receive(&server, &mut [0; 16]).unwrap();
        assert_eq!(read, 5);
        assert!(received.by_kernel, "this kernel gives no stamps");
        // Half a millisecond for the two clocks to drift apart.
        assert!((before - 500_000..sent + 500_000).contains(&received.at), "{before} {received:?} {sent}");
    }

    #[test]
    fn a_client_gets_a_token_when_the_log_says_it_was_written() {
        let config = crate::Config { ttft_ms: 5.0, itl_ms: 3.0, tokens: 50, ..crate::Config::default() };
        let server = crate::Server::start(config).unwrap();
        let mut client = TcpStream::connect(server.address()).unwrap();
        ask_for_stamps(client.as_raw_fd());
        let body = r#"{"prompt": "hello", "stream": true}"#;
        let length = body.len();
        let head = format!("POST /v1/completions HTTP/1.1\r\ncontent-length: {length}\r\n\r\n");
        client.write_all(format!("{head}{body}").as_bytes()).unwrap();
        let (mut buffer, mut got, mut all) = ([0; 4096], Vec::new(), Vec::new());
        while !all.ends_with(b"\r\n0\r\n\r\n") {
            let (read, received) = receive(&client, &mut buffer).unwrap();
            all.extend_from_slice(&buffer[..read]);
            got.push(received.at);
        }
        let served = (0..1_000)
            .find_map(|_| {
                std::thread::sleep(Duration::from_millis(5));
                server.log().pop()
            })
            .unwrap();
        // Each arrival belongs to the write right before it; a reader that is late misses some.
        let delays = got.iter().map(|at| {
            let written = served.written.iter().rev().find(|written| **written <= at + 200_000).unwrap();
            at.saturating_sub(*written)
        });
        let mut delays: Vec<u64> = delays.collect();
        delays.sort_unstable();
        assert!(delays[delays.len() / 2] < 1_000_000, "{delays:?}");
    }
}
