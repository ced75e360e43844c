//! NVML as C calls it: starting it, and asking for boards. Layouts and codes are those of `nvml.h`.
#![allow(unsafe_code)] // A C library is what this crate is.
#![allow(non_snake_case)]

mod device;
mod stubs;

use crate::machine::{self, Machine, Silent, Slot};
use crate::{Scenario, beside};
use std::ffi::{CStr, OsString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

type Status = c_int;
const SUCCESS: Status = 0;
const UNINITIALIZED: Status = 1;
const INVALID_ARGUMENT: Status = 2;
const NOT_SUPPORTED: Status = 3;
const NOT_FOUND: Status = 6;
const INSUFFICIENT_SIZE: Status = 7;
const ARGUMENT_VERSION_MISMATCH: Status = 25;
const UNKNOWN: Status = 999;

/// A board's index plus one, and in the bits above those a MIG instance's plus one: never null, and never followed.
type Handle = *mut c_void;
const INSTANCE: u32 = 16;

/// A loaded C library has nowhere else to keep what it is. `None` if the scenario could not be used.
static MACHINE: OnceLock<Option<Machine>> = OnceLock::new();
/// Calls of init without their shutdown.
static STARTS: AtomicU32 = AtomicU32::new(0);

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> Status {
    start()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> Status {
    start()
}

/// How NVIDIA's own Python binding starts it.
#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> Status {
    start()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> Status {
    let less = STARTS.try_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
    if less.is_ok() { SUCCESS } else { UNINITIALIZED }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(status: Status) -> *const c_char {
    let text = match status {
        SUCCESS => c"Success",
        UNINITIALIZED => c"Uninitialized",
        INVALID_ARGUMENT => c"Invalid Argument",
        NOT_SUPPORTED => c"Not Supported",
        NOT_FOUND => c"Not Found",
        INSUFFICIENT_SIZE => c"Insufficient Size",
        ARGUMENT_VERSION_MISMATCH => c"Argument Version Mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give_text(version, length, machine().map(|_| "999.00 (wattle-sim-nvml)")) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: c_uint) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give_text(version, length, machine().map(|_| "13.999.00")) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion(version: *mut c_int) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give(version, machine().map(|_| 13_000)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give(version, machine().map(|_| 13_000)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give(count, machine().map(|m| m.slots.len() as c_uint)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut Handle) -> Status {
    let there = machine().map(|m| m.slots.get(index as usize));
    let handle = there.and_then(|s| s.map(|_| handle(index as usize, None)).ok_or(INVALID_ARGUMENT));
    // SAFETY: the caller's promise is handed on.
    unsafe { give(device, handle) }
}

/// Of a board, or of a MIG instance on one.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut Handle) -> Status {
    // SAFETY: the caller's promise is handed on.
    let handle = unsafe { text(uuid) }.and_then(|uuid| {
        let found = machine()?.slots.iter().enumerate().find_map(|(index, slot)| {
            let instances = slot.board.mig.iter().flatten();
            let instance = instances.enumerate().find(|(_, id)| **id == uuid).map(|(i, _)| i);
            (slot.board.uuid == uuid || instance.is_some()).then(|| handle(index, instance))
        });
        found.ok_or(NOT_FOUND)
    });
    // SAFETY: the caller's promise is handed on.
    unsafe { give(device, handle) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(id: *const c_char, device: *mut Handle) -> Status {
    // SAFETY: the caller's promise is handed on.
    let handle = unsafe { text(id) }.and_then(|id| {
        let place = machine::place(id).ok_or(INVALID_ARGUMENT)?;
        machine()?.slots.iter().position(|s| s.place == place).map(|i| handle(i, None)).ok_or(NOT_FOUND)
    });
    // SAFETY: the caller's promise is handed on.
    unsafe { give(device, handle) }
}

fn start() -> Status {
    let named = std::env::var_os("WATTLE_SIM_NVML");
    let machine = MACHINE.get_or_init(|| match scenario(own_path(), named).and_then(Machine::new) {
        Ok(machine) => Some(machine),
        Err(why) => {
            #[allow(clippy::print_stderr)]
            // NVML has codes only; whoever wrote the scenario wants the reason.
            {
                eprintln!("wattle-sim-nvml: {why}");
            }
            None
        }
    });
    if machine.is_none() {
        return UNKNOWN;
    }
    STARTS.fetch_add(1, Ordering::Relaxed);
    SUCCESS
}

fn machine() -> Result<&'static Machine, Status> {
    let started = STARTS.load(Ordering::Relaxed) > 0;
    MACHINE.get().and_then(Option::as_ref).filter(|_| started).ok_or(UNINITIALIZED)
}

fn handle(index: usize, instance: Option<usize>) -> Handle {
    std::ptr::without_provenance_mut(index + 1 + instance.map_or(0, |i| (i + 1) << INSTANCE))
}

/// A board and its index.
fn slot(device: Handle) -> Result<(usize, &'static Slot), Status> {
    let index = device.addr().checked_sub(1).ok_or(INVALID_ARGUMENT)?;
    Ok((index, machine()?.slots.get(index).ok_or(INVALID_ARGUMENT)?))
}

/// A MIG instance: its board, and its place on it.
fn instance(device: Handle) -> Result<(usize, usize), Status> {
    let (low, high) = (device.addr() & ((1 << INSTANCE) - 1), device.addr() >> INSTANCE);
    let (board, instance) = low.checked_sub(1).zip(high.checked_sub(1)).ok_or(INVALID_ARGUMENT)?;
    let there = machine()?.slots.get(board).and_then(|s| s.board.mig.as_ref()?.get(instance));
    there.map(|_| (board, instance)).ok_or(INVALID_ARGUMENT)
}

impl From<Silent> for Status {
    fn from(silent: Silent) -> Status {
        match silent {
            Silent::Lacks => NOT_SUPPORTED,
            Silent::Fails => UNKNOWN,
        }
    }
}

/// # Safety
/// `text` is null or ends in a zero.
unsafe fn text<'a>(text: *const c_char) -> Result<&'a str, Status> {
    if text.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: not null, and so a C string by the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| INVALID_ARGUMENT)
}

/// # Safety
/// `out` is null or can be written to.
unsafe fn give<T>(out: *mut T, value: Result<T, Status>) -> Status {
    match value {
        Ok(_) if out.is_null() => INVALID_ARGUMENT,
        Ok(value) => {
            // SAFETY: not null, and so writable by the caller's promise.
            unsafe { out.write(value) };
            SUCCESS
        }
        Err(status) => status,
    }
}

/// # Safety
/// `out` is null or has room for `length` characters.
unsafe fn give_text(out: *mut c_char, length: c_uint, text: Result<&str, Status>) -> Status {
    match text {
        Ok(_) if out.is_null() => INVALID_ARGUMENT,
        Ok(text) if text.len() >= length as usize => INSUFFICIENT_SIZE,
        Ok(text) => {
            // SAFETY: not null, with room for the text and the zero after it as just checked.
            unsafe {
                out.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len());
                out.add(text.len()).write(0);
            }
            SUCCESS
        }
        Err(status) => status,
    }
}

/// # Safety
/// `count` is null or can be read and written, and `out` is null or has room for as many.
unsafe fn give_list<T>(count: *mut c_uint, out: *mut T, list: Result<Vec<T>, Status>) -> Status {
    let list = match list {
        Ok(_) if count.is_null() => return INVALID_ARGUMENT,
        Ok(list) => list,
        Err(status) => return status,
    };
    // SAFETY: not null, and so readable by the caller's promise.
    let room = unsafe { count.replace(list.len() as c_uint) } as usize;
    if room < list.len() {
        return INSUFFICIENT_SIZE;
    }
    if out.is_null() && !list.is_empty() {
        return INVALID_ARGUMENT;
    }
    for (i, item) in list.into_iter().enumerate() {
        // SAFETY: not null, with room for the list as just checked.
        unsafe { out.add(i).write(item) };
    }
    SUCCESS
}

fn scenario(library: Option<PathBuf>, named: Option<OsString>) -> Result<Scenario, String> {
    let own = library.map(|l| beside(&l)).filter(|path| path.is_file());
    let Some(path) = own.or_else(|| named.map(PathBuf::from)) else {
        return Ok(Scenario::default());
    };
    let bad = |e: &dyn std::fmt::Display| format!("cannot use scenario {}: {e}", path.display());
    let text = std::fs::read_to_string(&path).map_err(|e| bad(&e))?;
    Ok(Scenario::parse(&text).map_err(|e| bad(&e))?.below(path.parent()))
}

/// The path this library was loaded from.
fn own_path() -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;

    #[repr(C)]
    struct DlInfo {
        path: *const c_char,
        base: *mut c_void,
        symbol: *const c_char,
        address: *mut c_void,
    }
    unsafe extern "C" {
        fn dladdr(address: *const c_void, info: *mut DlInfo) -> c_int;
    }
    let null = std::ptr::null_mut();
    let mut info = DlInfo { path: std::ptr::null(), base: null, symbol: std::ptr::null(), address: null };
    // SAFETY: any address may be asked for, and `info` has the layout of `Dl_info`.
    let found = unsafe { dladdr((&raw const STARTS).cast(), &mut info) } != 0 && !info.path.is_null();
    // SAFETY: dladdr found this library; the loader keeps its path as long as it is loaded.
    let path = found.then(|| unsafe { CStr::from_ptr(info.path) })?;
    Some(Path::new(std::ffi::OsStr::from_bytes(path.to_bytes())).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Board;

    #[test]
    fn a_scenario_beside_the_library_goes_before_the_one_that_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (library, named) = (folder.path().join("lib.so"), folder.path().join("named.json"));
        let first = |named: Option<&PathBuf>| {
            let scenario = scenario(Some(library.clone()), named.map(|n| n.clone().into()))?;
            Ok::<String, String>(scenario.devices[0].name.clone())
        };
        assert_eq!(first(None), Ok(Board::default().name));
        assert!(first(Some(&named)).is_err_and(|why| why.contains("named.json")));
        std::fs::write(&named, r#"{"devices": [{"name": "named"}]}"#).unwrap();
        assert_eq!(first(Some(&named)), Ok("named".into()));
        std::fs::write(beside(&library), r#"{"devices": [{"name": "beside"}]}"#).unwrap();
        assert_eq!(first(Some(&named)), Ok("beside".into()));
    }
}
