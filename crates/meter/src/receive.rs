//! Bytes from a socket with the moment at which the kernel got them.
//!
//! A stamp taken after a read tells when we had time for it. The kernel's own (`SO_TIMESTAMPNS`) does not grow with our load; it is of
//! the wall clock, and is put on the monotonic one right away, so that a step of the wall clock between the two is all that can
//! move it.
#![allow(unsafe_code)] // rustix knows no time stamps in control messages.

use crate::clock;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use wattle_core::time::Stamp;

/// A stamp further in the past than this is none: the wall clock was stepped.
const OLDEST_NS: u64 = 60_000_000_000;

/// When bytes came, and who says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// The moment of the last of them.
    pub at: Stamp,
    /// Whether the kernel says so; else it is when they were read.
    pub by_kernel: bool,
}

/// Asks the kernel to stamp what comes in. One that does not leaves us our own stamps.
pub fn ask_for_stamps(socket: BorrowedFd<'_>) {
    #[cfg(target_os = "linux")]
    {
        let on: libc::c_int = 1;
        // SAFETY: the kernel reads one int, which lives until the call returns.
        unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_TIMESTAMPNS,
                (&raw const on).cast(),
                size_of_val(&on) as libc::socklen_t,
            );
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = socket;
}

/// Room for one control message with a `timespec`, aligned as control messages must be.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// Reads what there is, without waiting if the socket does not wait.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Arrival)> {
    let mut control = Control([0; 64]);
    let mut piece = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: a header of zeros has no address, no pieces and no control room; those that are needed are set below.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len() as _;
    // SAFETY: the header leads to a buffer and a control room that both live until the call returns.
    let read = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) };
    let Ok(read) = usize::try_from(read) else { return Err(io::Error::last_os_error()) };
    let now = clock::now();
    let arrival = match stamp(&message).and_then(|wall| on_our_clock(wall, now)) {
        Some(at) => Arrival { at, by_kernel: true },
        None => Arrival { at: now, by_kernel: false },
    };
    Ok((read, arrival))
}

/// Nanoseconds of wall time, from the control messages.
#[cfg(target_os = "linux")]
fn stamp(message: &libc::msghdr) -> Option<u64> {
    // SAFETY: the kernel filled the header in, and the macros stay within its control room.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(message);
        while let Some(header) = next.as_ref() {
            if (header.cmsg_level, header.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS) {
                let time = libc::CMSG_DATA(header).cast::<libc::timespec>().read_unaligned();
                return Some(
                    u64::try_from(time.tv_sec).ok()? * 1_000_000_000 + u64::try_from(time.tv_nsec).ok()?,
                );
            }
            next = libc::CMSG_NXTHDR(message, header);
        }
    }
    None
}

#[cfg(not(target_os = "linux"))]
fn stamp(_message: &libc::msghdr) -> Option<u64> {
    None
}

/// The same moment on the monotonic clock, if it can be one of the past.
fn on_our_clock(wall: u64, now: Stamp) -> Option<Stamp> {
    let ago = clock::wall_nanos().checked_sub(wall).filter(|ago| *ago < OLDEST_NS)?;
    Some(now.minus_nanos(ago))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::time::Duration;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_stamp_is_of_the_arrival_and_not_of_the_read() {
        let (mut near, far) = pair();
        ask_for_stamps(far.as_fd());
        let mut buffer = [0; 8];
        // The first socket that asks makes the kernel begin to stamp, a little later.
        for _ in 0..100 {
            let sent = clock::now();
            near.write_all(b"x").unwrap();
            let written = clock::now();
            std::thread::sleep(Duration::from_millis(20));
            let (n, arrival) = receive(far.as_fd(), &mut buffer).unwrap();
            assert_eq!(n, 1);
            if arrival.by_kernel {
                // Between the two clocks lie the two looks at them.
                let slack = 1_000_000;
                assert!(sent.minus_nanos(slack) <= arrival.at && arrival.at <= written.plus_nanos(slack));
                return;
            }
        }
        panic!("the kernel gave no stamp");
    }

    #[test]
    fn without_stamps_it_is_the_moment_of_the_read() {
        let (mut near, far) = pair();
        near.write_all(b"hello").unwrap();
        let before = clock::now();
        let (n, arrival) = receive(far.as_fd(), &mut [0; 8]).unwrap();
        assert_eq!((n, arrival.by_kernel), (5, false));
        assert!(before <= arrival.at && arrival.at <= clock::now());
        drop(near);
        assert_eq!(receive(far.as_fd(), &mut [0; 8]).unwrap().0, 0, "the end");
    }

    #[test]
    fn a_stamp_of_a_stepped_clock_is_none() {
        let now = clock::now();
        let wall = clock::wall_nanos();
        assert_eq!(on_our_clock(wall + 3_600_000_000_000, now), None);
        assert_eq!(on_our_clock(wall - 3_600_000_000_000, now), None);
        assert!(on_our_clock(wall, now).is_some());
    }
}
