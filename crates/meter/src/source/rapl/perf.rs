//! One system call: a counter of a whole CPU, as perf opens it.
#![allow(unsafe_code)] // No crate in use has this call, and the one that has brings a megabyte of bindings.

use std::fs::File;
use std::io;

/// The head of `struct perf_event_attr` as of its first version (64 bytes); the kernel takes the rest for zero.
#[cfg(target_os = "linux")]
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    rest: [u64; 6],
}

/// Starts counting event `config` of the PMU number `kind` on `cpu`, whoever runs there. Reading gives the count as a `u64`.
#[cfg(target_os = "linux")]
pub(super) fn open(kind: u32, config: u64, cpu: u32) -> io::Result<File> {
    use std::os::fd::{FromRawFd, OwnedFd};
    const CLOSE_ON_EXEC: libc::c_ulong = 8; // PERF_FLAG_FD_CLOEXEC, linux/perf_event.h
    const EVERYBODY: libc::pid_t = -1;
    const NO_GROUP: libc::c_int = -1;
    let mut attributes =
        Attributes { kind, size: size_of::<Attributes>() as u32, config, ..Attributes::default() };
    let cpu = libc::c_int::try_from(cpu).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the kernel reads `size` bytes at the pointer and may write the size it would rather have (E2BIG) into them; all
    // are initialised, ours alone and alive until the call returns.
    let fd = unsafe {
        libc::syscall(libc::SYS_perf_event_open, &raw mut attributes, EVERYBODY, cpu, NO_GROUP, CLOSE_ON_EXEC)
    };
    let fd = libc::c_int::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the call has just made this descriptor, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) }.into())
}

/// Only Linux has perf events.
#[cfg(not(target_os = "linux"))]
pub(super) fn open(_: u32, _: u64, _: u32) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}
