//! The functions of NVML, as C calls them. Layouts and codes are those of `nvml.h`.
#![allow(unsafe_code)] // A C library is what this crate is.
#![allow(non_snake_case)]

use crate::{Board, Part, Scenario, beside};
use rustix::time::{ClockId, clock_gettime};
use std::ffi::{CStr, OsString, c_char, c_int, c_longlong, c_uint, c_ulonglong, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

type Status = c_int;
const SUCCESS: Status = 0;
const UNINITIALIZED: Status = 1;
const INVALID_ARGUMENT: Status = 2;
const NOT_SUPPORTED: Status = 3;
const INSUFFICIENT_SIZE: Status = 7;
const UNKNOWN: Status = 999;

const FIELD_POWER_INSTANT: c_uint = 186;
const VALUE_TYPE_UNSIGNED_INT: c_uint = 1;

/// A board's index plus one: never null, and never followed.
type Handle = *mut c_void;

#[repr(C)]
struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

#[repr(C)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

#[repr(C)]
struct FieldValue {
    field_id: c_uint,
    scope_id: c_uint,
    timestamp: c_longlong,
    latency_usec: c_longlong,
    value_type: c_uint,
    status: Status,
    /// A union of eight bytes in C; an unsigned int lies in the first four.
    value: [u8; 8],
}

struct Machine {
    boards: Vec<(Board, AtomicU64)>,
}

/// A loaded C library has nowhere else to keep what it is. `None` if the scenario could not be used.
static MACHINE: OnceLock<Option<Machine>> = OnceLock::new();
/// Calls of init without their shutdown.
static STARTS: AtomicU32 = AtomicU32::new(0);

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
unsafe extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give_text(version, length, machine().map(|_| "999.00 (wattle-sim-nvml)")) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give(count, machine().map(|m| m.boards.len() as c_uint)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut Handle) -> Status {
    let handle = machine().and_then(|m| {
        let there = (index as usize) < m.boards.len();
        there.then(|| std::ptr::without_provenance_mut(index as usize + 1)).ok_or(INVALID_ARGUMENT)
    });
    // SAFETY: the caller's promise is handed on.
    unsafe { give(device, handle) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetName(device: Handle, name: *mut c_char, length: c_uint) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give_text(name, length, board(device).map(|(b, _)| b.name.as_str())) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUUID(device: Handle, uuid: *mut c_char, length: c_uint) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give_text(uuid, length, board(device).map(|(b, _)| b.uuid.as_str())) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTotalEnergyConsumption(device: Handle, energy: *mut c_ulonglong) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give(energy, read(device, Part::EnergyCounter, |b| b.counter_mj(now()))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPowerUsage(device: Handle, power: *mut c_uint) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give(power, read(device, Part::PowerAverage, |b| milli(b.average_watts(now())))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetFieldValues(
    device: Handle,
    count: c_int,
    values: *mut FieldValue,
) -> Status {
    let count = usize::try_from(count).unwrap_or(0);
    if values.is_null() || count == 0 {
        return INVALID_ARGUMENT;
    }
    if let Err(status) = board(device) {
        return status;
    }
    // SAFETY: the caller promises `count` initialised fields at `values`, which is not null.
    for field in unsafe { std::slice::from_raw_parts_mut(values, count) } {
        let power = match (field.field_id, field.scope_id) {
            (FIELD_POWER_INSTANT, 0) => read(device, Part::PowerInstant, |b| milli(b.watts(now()))),
            _ => Err(NOT_SUPPORTED),
        };
        field.status = power.err().unwrap_or(SUCCESS);
        field.value_type = VALUE_TYPE_UNSIGNED_INT;
        field.value[..4].copy_from_slice(&power.unwrap_or(0).to_ne_bytes());
    }
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: Handle, memory: *mut Memory) -> Status {
    let info = read(device, Part::MemoryInfo, |b| Memory {
        total: b.memory_total,
        free: b.memory_total.saturating_sub(b.memory_used),
        used: b.memory_used,
    });
    // SAFETY: the caller's promise is handed on.
    unsafe { give(memory, info) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUtilizationRates(device: Handle, rates: *mut Utilization) -> Status {
    let busy = |b: &Board| Utilization { gpu: b.utilisation, memory: b.memory_utilisation };
    // SAFETY: the caller's promise is handed on.
    unsafe { give(rates, read(device, Part::Utilisation, busy)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTemperature(
    device: Handle,
    sensor: c_uint,
    celsius: *mut c_uint,
) -> Status {
    let value = match sensor {
        0 => read(device, Part::Temperature, |b| b.temperature),
        _ => Err(INVALID_ARGUMENT),
    };
    // SAFETY: the caller's promise is handed on.
    unsafe { give(celsius, value) }
}

fn start() -> Status {
    let machine = MACHINE.get_or_init(|| match scenario(own_path(), std::env::var_os("WATTLE_SIM_NVML")) {
        Ok(Scenario { devices }) => {
            Some(Machine { boards: devices.into_iter().map(|b| (b, AtomicU64::new(0))).collect() })
        }
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

fn board(device: Handle) -> Result<&'static (Board, AtomicU64), Status> {
    let index = device.addr().checked_sub(1).ok_or(INVALID_ARGUMENT)?;
    machine()?.boards.get(index).ok_or(INVALID_ARGUMENT)
}

/// One answer of a board, if it has that part and is not failing.
fn read<T>(device: Handle, part: Part, answer: impl FnOnce(&Board) -> T) -> Result<T, Status> {
    let (board, answers) = board(device)?;
    if board.without.contains(&part) {
        return Err(NOT_SUPPORTED);
    }
    let before = answers.fetch_add(1, Ordering::Relaxed);
    let failed = board.fail_after.and_then(|n| before.checked_sub(n));
    if failed.is_some_and(|n| n < board.fail_for.unwrap_or(u64::MAX)) {
        return Err(UNKNOWN);
    }
    Ok(answer(board))
}

fn milli(watts: f64) -> c_uint {
    (watts * 1e3).round() as c_uint
}

fn now() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
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

fn scenario(library: Option<PathBuf>, named: Option<OsString>) -> Result<Scenario, String> {
    let own = library.map(|l| beside(&l)).filter(|path| path.is_file());
    let Some(path) = own.or_else(|| named.map(PathBuf::from)) else {
        return Ok(Scenario::default());
    };
    let bad = |e: &dyn std::fmt::Display| format!("cannot use scenario {}: {e}", path.display());
    Scenario::parse(&std::fs::read_to_string(&path).map_err(|e| bad(&e))?).map_err(|e| bad(&e))
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
