//! What can be asked of a board.

use super::{
    ARGUMENT_VERSION_MISMATCH, Handle, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, SUCCESS, Status, give,
    give_list, give_text, handle, instance, machine, slot,
};
use crate::live::now;
use crate::machine::Slot;
use crate::{Board, Part};
use std::ffi::{c_char, c_int, c_longlong, c_uint, c_ulonglong};

const FIELD_TOTAL_ENERGY: c_uint = 83;
const FIELD_POWER_AVERAGE: c_uint = 185;
const FIELD_POWER_INSTANT: c_uint = 186;
const VALUE_TYPE_UNSIGNED_INT: c_uint = 1;
const VALUE_TYPE_UNSIGNED_LONG_LONG: c_uint = 3;
/// `nvmlMemory_v2`: version 2 of 40 bytes.
const MEMORY_V2: c_uint = 0x0200_0028;

#[repr(C)]
struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

#[repr(C)]
struct MemoryV2 {
    version: c_uint,
    total: c_ulonglong,
    reserved: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

#[repr(C)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

#[repr(C)]
struct Temperature {
    version: c_uint,
    sensor: c_uint,
    celsius: c_int,
}

#[repr(C)]
struct PciInfo {
    bus_id_legacy: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    bus_id: [u8; 32],
}

#[repr(C)]
struct Process {
    pid: c_uint,
    memory: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
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

/// Functions that take a board and a place for the answer.
macro_rules! answers {
    ($($name:ident($device:ident) -> $answer:ty { $value:expr })*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($device: Handle, out: *mut $answer) -> Status {
            // SAFETY: the caller's promise is handed on.
            unsafe { give(out, $value) }
        }
    )*};
}

answers! {
    nvmlDeviceGetIndex(device) -> c_uint { slot(device).map(|(i, _)| i as c_uint) }
    nvmlDeviceGetMinorNumber(device) -> c_uint { slot(device).map(|(i, _)| i as c_uint) }
    nvmlDeviceGetArchitecture(device) -> c_uint { know(device, Part::Architecture, |s| s.board.architecture) }
    nvmlDeviceGetPersistenceMode(device) -> c_uint { slot(device).map(|_| 1) }
    nvmlDeviceGetComputeMode(device) -> c_uint { slot(device).map(|_| 0) }
    nvmlDeviceGetPowerManagementMode(device) -> c_uint { slot(device).map(|_| 1) }
    nvmlDeviceGetTotalEnergyConsumption(device) -> c_ulonglong { energy(device) }
    nvmlDeviceGetPowerUsage(device) -> c_uint { average(device) }
    nvmlDeviceGetEnforcedPowerLimit(device) -> c_uint { read(device, Part::PowerLimit, |b| milli(b.power_limit)) }
    nvmlDeviceGetPowerManagementLimit(device) -> c_uint { know(device, Part::PowerLimit, limit) }
    nvmlDeviceGetPowerManagementDefaultLimit(device) -> c_uint { know(device, Part::PowerLimit, limit) }
    nvmlDeviceGetCurrentClocksEventReasons(device) -> c_ulonglong { read(device, Part::Throttle, |b| b.throttle) }
    nvmlDeviceGetCurrentClocksThrottleReasons(device) -> c_ulonglong { read(device, Part::Throttle, |b| b.throttle) }
    nvmlDeviceGetUtilizationRates(device) -> Utilization {
        read(device, Part::Utilisation, |b| Utilization { gpu: b.utilisation, memory: b.memory_utilisation })
    }
    nvmlDeviceGetMemoryInfo(device) -> Memory {
        read(device, Part::MemoryInfo, |b| Memory { total: b.memory_total, free: free(b), used: b.memory_used })
    }
    nvmlDeviceGetPciInfo_v3(device) -> PciInfo { know(device, Part::Pci, pci_info) }
    nvmlDeviceGetMaxMigDeviceCount(device) -> c_uint {
        slot(device).map(|(_, s)| s.board.mig.as_ref().map_or(0, |m| m.len()) as c_uint)
    }
    nvmlDeviceIsMigDeviceHandle(device) -> c_uint {
        slot(device).map(|_| 0).or_else(|_| instance(device).map(|_| 1))
    }
    nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device) -> Handle {
        instance(device).map(|(board, _)| handle(board, None))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetName(device: Handle, name: *mut c_char, length: c_uint) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give_text(name, length, slot(device).map(|(_, s)| s.board.name.as_str())) }
}

/// Of a board, or of a MIG instance.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUUID(device: Handle, uuid: *mut c_char, length: c_uint) -> Status {
    let id = match instance(device) {
        Ok((board, i)) => machine().and_then(|m| {
            let instances = m.slots[board].board.mig.as_ref();
            instances.map(|ids| ids[i].as_str()).ok_or(INVALID_ARGUMENT)
        }),
        Err(_) => know(device, Part::Uuid, |s| s.board.uuid.as_str()),
    };
    // SAFETY: the caller's promise is handed on.
    unsafe { give_text(uuid, length, id) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetSerial(device: Handle, serial: *mut c_char, length: c_uint) -> Status {
    let number = slot(device).map(|(i, _)| format!("{:013}", i + 1));
    // SAFETY: the caller's promise is handed on.
    unsafe { give_text(serial, length, number.as_deref().map_err(|status| *status)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: Handle,
    major: *mut c_int,
    minor: *mut c_int,
) -> Status {
    let capability = know(device, Part::Architecture, |s| match s.board.architecture {
        ..=4 => (6, 0),
        5 => (7, 0),
        6 => (7, 5),
        7 => (8, 0),
        8 => (8, 9),
        architecture => (architecture as c_int, 0),
    });
    // SAFETY: the caller's promise is handed on.
    unsafe { give_two(major, minor, capability) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPowerManagementLimitConstraints(
    device: Handle,
    least: *mut c_uint,
    most: *mut c_uint,
) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give_two(least, most, know(device, Part::PowerLimit, |s| (limit(s) / 4, limit(s)))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMigMode(
    device: Handle,
    current: *mut c_uint,
    pending: *mut c_uint,
) -> Status {
    let mode = slot(device).and_then(|(_, s)| s.board.mig.as_ref().map(|_| (1, 1)).ok_or(NOT_SUPPORTED));
    // SAFETY: the caller's promise is handed on.
    unsafe { give_two(current, pending, mode) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: Handle,
    index: c_uint,
    mig: *mut Handle,
) -> Status {
    let handle = slot(device).and_then(|(board, s)| {
        let instances = s.board.mig.as_ref().ok_or(NOT_SUPPORTED)?;
        instances.get(index as usize).map(|_| handle(board, Some(index as usize))).ok_or(NOT_FOUND)
    });
    // SAFETY: the caller's promise is handed on.
    unsafe { give(mig, handle) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetClockInfo(device: Handle, domain: c_uint, mhz: *mut c_uint) -> Status {
    let clock = match domain {
        0 | 1 | 3 => read(device, Part::Clocks, |b| b.clocks.0), // graphics, SM, video
        2 => read(device, Part::Clocks, |b| b.clocks.1),
        _ => Err(INVALID_ARGUMENT),
    };
    // SAFETY: the caller's promise is handed on.
    unsafe { give(mhz, clock) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetSupportedMemoryClocks(
    device: Handle,
    count: *mut c_uint,
    mhz: *mut c_uint,
) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give_list(count, mhz, know(device, Part::Clocks, |s| vec![s.board.clocks.1])) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetSupportedGraphicsClocks(
    device: Handle,
    memory_mhz: c_uint,
    count: *mut c_uint,
    mhz: *mut c_uint,
) -> Status {
    let clocks = know(device, Part::Clocks, |s| s.board.clocks)
        .and_then(|(sm, memory)| if memory == memory_mhz { Ok(vec![sm]) } else { Err(NOT_FOUND) });
    // SAFETY: the caller's promise is handed on.
    unsafe { give_list(count, mhz, clocks) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v2(
    device: Handle,
    count: *mut c_uint,
    list: *mut Process,
) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give_list(count, list, processes(device, |b| &b.processes)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: Handle,
    count: *mut c_uint,
    list: *mut Process,
) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give_list(count, list, processes(device, |b| &b.processes)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v2(
    device: Handle,
    count: *mut c_uint,
    list: *mut Process,
) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give_list(count, list, processes(device, |b| &b.graphics_processes)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    device: Handle,
    count: *mut c_uint,
    list: *mut Process,
) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give_list(count, list, processes(device, |b| &b.graphics_processes)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: *mut MemoryV2) -> Status {
    if memory.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: not null, and the caller promises that the version is set.
    let version = unsafe { (*memory).version };
    let info = read(device, Part::MemoryInfo, |b| {
        let (total, free, used) = (b.memory_total, free(b), b.memory_used);
        MemoryV2 { version, total, reserved: 0, free, used }
    });
    // SAFETY: the caller's promise is handed on.
    unsafe { give(memory, if version == MEMORY_V2 { info } else { Err(ARGUMENT_VERSION_MISMATCH) }) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTemperature(
    device: Handle,
    sensor: c_uint,
    celsius: *mut c_uint,
) -> Status {
    // SAFETY: the caller's promise is handed on.
    unsafe { give(celsius, temperature(device, sensor)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTemperatureV(device: Handle, asked: *mut Temperature) -> Status {
    if asked.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: not null, and the caller promises that version and sensor are set.
    let (version, sensor) = unsafe { ((*asked).version, (*asked).sensor) };
    let answer = |celsius| Temperature { version, sensor, celsius: celsius as c_int };
    // SAFETY: the caller's promise is handed on.
    unsafe { give(asked, temperature(device, sensor).map(answer)) }
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
    let slot = match slot(device) {
        Ok((_, slot)) => slot,
        Err(status) => return status,
    };
    // SAFETY: the caller promises `count` initialised fields at `values`, which is not null.
    for field in unsafe { std::slice::from_raw_parts_mut(values, count) } {
        let (value_type, value) = match (field.field_id, field.scope_id) {
            (FIELD_TOTAL_ENERGY, 0) => {
                let offered = slot.has(Part::EnergyField).map_err(Status::from);
                (VALUE_TYPE_UNSIGNED_LONG_LONG, offered.and_then(|()| energy(device)))
            }
            (FIELD_POWER_INSTANT, 0) => (VALUE_TYPE_UNSIGNED_INT, instant(device).map(c_ulonglong::from)),
            (FIELD_POWER_AVERAGE, 0) => (VALUE_TYPE_UNSIGNED_INT, average(device).map(c_ulonglong::from)),
            _ => (VALUE_TYPE_UNSIGNED_INT, Err(NOT_SUPPORTED)),
        };
        field.status = value.err().unwrap_or(SUCCESS);
        field.value_type = value_type;
        // Little-endian, as every machine that NVML is made for: a shorter integer lies in the first bytes.
        field.value = value.unwrap_or(0).to_le_bytes();
    }
    SUCCESS
}

/// Something about a board that stays as it is.
fn know<T>(device: Handle, part: Part, tell: impl FnOnce(&'static Slot) -> T) -> Result<T, Status> {
    let (_, slot) = slot(device)?;
    slot.has(part)?;
    Ok(tell(slot))
}

/// One answer of a board, if it has that part and is not failing.
fn read<T>(device: Handle, part: Part, answer: impl FnOnce(&Board) -> T) -> Result<T, Status> {
    let (_, slot) = slot(device)?;
    slot.answer(part)?;
    Ok(answer(&slot.board))
}

fn energy(device: Handle) -> Result<c_ulonglong, Status> {
    let (index, slot) = slot(device)?;
    slot.answer(Part::EnergyCounter)?;
    Ok(machine()?.counter_mj(index, now()))
}

fn instant(device: Handle) -> Result<c_uint, Status> {
    let (index, slot) = slot(device)?;
    slot.answer(Part::PowerInstant)?;
    Ok(milli(machine()?.watts(index, now())))
}

fn average(device: Handle) -> Result<c_uint, Status> {
    let (index, slot) = slot(device)?;
    slot.answer(Part::PowerAverage)?;
    Ok(milli(machine()?.average_watts(index, now())))
}

fn temperature(device: Handle, sensor: c_uint) -> Result<c_uint, Status> {
    match sensor {
        0 => read(device, Part::Temperature, |b| b.temperature),
        _ => Err(INVALID_ARGUMENT),
    }
}

fn processes(device: Handle, of: fn(&Board) -> &[u32]) -> Result<Vec<Process>, Status> {
    const WHOLE_BOARD: c_uint = c_uint::MAX;
    let process = |pid: &u32| Process {
        pid: *pid,
        memory: 1 << 30,
        gpu_instance: WHOLE_BOARD,
        compute_instance: WHOLE_BOARD,
    };
    know(device, Part::Processes, |s| of(&s.board).iter().map(process).collect())
}

fn pci_info(slot: &Slot) -> PciInfo {
    fn bytes<const N: usize>(text: &str) -> [u8; N] {
        let mut bytes = [0; N];
        // One less: the zero at the end.
        bytes.iter_mut().take(N - 1).zip(text.bytes()).for_each(|(to, from)| *to = from);
        bytes
    }
    let (domain, bus, device) = slot.place;
    PciInfo {
        bus_id_legacy: bytes(&format!("{domain:04X}:{bus:02X}:{device:02X}.0")),
        domain,
        bus,
        device,
        device_id: 0x2330_10DE,
        subsystem_id: 0x16C1_10DE,
        bus_id: bytes(&format!("{domain:08X}:{bus:02X}:{device:02X}.0")),
    }
}

fn free(board: &Board) -> c_ulonglong {
    board.memory_total.saturating_sub(board.memory_used)
}

fn limit(slot: &Slot) -> c_uint {
    milli(slot.board.power_limit)
}

fn milli(watts: f64) -> c_uint {
    (watts * 1e3).round() as c_uint
}

/// # Safety
/// Each of the two is null or can be written to.
unsafe fn give_two<T>(first: *mut T, second: *mut T, values: Result<(T, T), Status>) -> Status {
    match values {
        Ok(_) if first.is_null() || second.is_null() => INVALID_ARGUMENT,
        // SAFETY: the caller's promise is handed on.
        Ok((one, two)) => unsafe { give(first, Ok(one)).max(give(second, Ok(two))) },
        Err(status) => status,
    }
}
