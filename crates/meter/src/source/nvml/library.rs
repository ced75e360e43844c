//! The few functions of NVML that are used, found at run time. All of this source's unsafe code is in this file; what it
//! hands out is safe. Signatures, layouts and codes are those of `nvml.h`.
#![allow(unsafe_code)] // A C library cannot be called without.

use super::select::Place;
use crate::source::Unavailable;
use std::error::Error;
use std::ffi::{CStr, CString, c_char, c_int, c_longlong, c_uint, c_ulonglong, c_void};

/// The name under which every Linux driver installs it.
pub(super) const SONAME: &str = "libnvidia-ml.so.1";

type Status = c_int;
const SUCCESS: Status = 0;
const NO_PERMISSION: Status = 4;
const INSUFFICIENT_SIZE: Status = 7;
const GPU_IS_LOST: Status = 15;

const FIELD_TOTAL_ENERGY: c_uint = 83;
const FIELD_POWER_INSTANT: c_uint = 186;
const CLOCK_SM: c_uint = 1;
const CLOCK_MEMORY: c_uint = 2;
const TEMPERATURE_OF_GPU: c_uint = 0;
/// `NVML_DEVICE_NAME_V2_BUFFER_SIZE` and `NVML_DEVICE_UUID_V2_BUFFER_SIZE`, the longest texts asked for.
const TEXT: usize = 96;

/// A board, as NVML knows it until shutdown.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(super) struct Board(*mut c_void);

// SAFETY: the handle is only ever given back to NVML, which may be called from any thread (NVML reference, introduction).
unsafe impl Send for Board {}

#[repr(C)]
#[derive(Default)]
struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

#[repr(C)]
#[derive(Default)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

#[repr(C)]
#[derive(Default)]
struct FieldValue {
    field_id: c_uint,
    scope_id: c_uint,
    timestamp: c_longlong,
    latency_usec: c_longlong,
    value_type: c_uint,
    status: Status,
    /// A union in C. NVML is there for little-endian machines only: a shorter integer lies in the low bits.
    value: c_ulonglong,
}

#[repr(C)]
#[derive(Default)]
struct PciInfo {
    bus_id_legacy: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    bus_id: [u8; 32],
}

/// Room for one process: 24 bytes of `nvmlProcessInfo_v2_t`, and 8 more because the first drivers of the 535 line wrote as many.
type ProcessRoom = [u64; 4];
/// Each process starts at its own third word; its number is the low half of that.
const PROCESS_WORDS: usize = 3;

type Get<T> = unsafe extern "C" fn(Board, *mut T) -> Status;
type GetText = unsafe extern "C" fn(Board, *mut c_char, c_uint) -> Status;
type GetSystemText = unsafe extern "C" fn(*mut c_char, c_uint) -> Status;
type GetOf = unsafe extern "C" fn(Board, c_uint, *mut c_uint) -> Status;
type GetProcesses = unsafe extern "C" fn(Board, *mut c_uint, *mut ProcessRoom) -> Status;

/// The boards there are.
pub(super) struct Boards {
    /// Those this process may use, with their index.
    pub(super) open: Vec<(u32, Board)>,
    /// The others, and why.
    pub(super) closed: Vec<(u32, String)>,
}

/// NVML, initialised; shut down when dropped.
pub(super) struct Library {
    shutdown: unsafe extern "C" fn() -> Status,
    count: unsafe extern "C" fn(*mut c_uint) -> Status,
    handle: unsafe extern "C" fn(c_uint, *mut Board) -> Status,
    uuid: GetText,
    name: Option<GetText>,
    driver: Option<GetSystemText>,
    version: Option<GetSystemText>,
    energy: Option<Get<c_ulonglong>>,
    power: Option<Get<c_uint>>,
    fields: Option<unsafe extern "C" fn(Board, c_int, *mut FieldValue) -> Status>,
    memory: Option<Get<Memory>>,
    utilisation: Option<Get<Utilization>>,
    temperature: Option<GetOf>,
    clock: Option<GetOf>,
    power_limit: Option<Get<c_uint>>,
    default_limit: Option<Get<c_uint>>,
    throttle: Option<Get<c_ulonglong>>,
    architecture: Option<Get<c_uint>>,
    pci: Option<Get<PciInfo>>,
    mig_mode: Option<unsafe extern "C" fn(Board, *mut c_uint, *mut c_uint) -> Status>,
    /// Lists of those that compute and of those that draw.
    processes: [Option<GetProcesses>; 2],
    by_uuid: Option<unsafe extern "C" fn(*const c_char, *mut Board) -> Status>,
    mig_holder: Option<unsafe extern "C" fn(Board, *mut Board) -> Status>,
    /// The code that the pointers above lead into; unloaded last, after `drop` has run.
    _code: libloading::Library,
}

impl Library {
    /// Loads and initialises the library at `path`, or the one that the system's loader finds by that name.
    pub(super) fn open(path: &str) -> Result<Self, Unavailable> {
        // SAFETY: runs the library's initialisers. NVIDIA's ask for nothing; another path is the user's own choice.
        let code = unsafe { libloading::Library::new(path) }.map_err(|e| cannot_load(path, &e))?;
        // SAFETY: here and below, a pointer gets the type that nvml.h declares for the function of that name.
        let (init, shutdown, count, handle, uuid) = unsafe {
            (
                need::<unsafe extern "C" fn() -> Status>(&code, path, "nvmlInit_v2")?,
                need(&code, path, "nvmlShutdown")?,
                need(&code, path, "nvmlDeviceGetCount_v2")?,
                need(&code, path, "nvmlDeviceGetHandleByIndex_v2")?,
                need(&code, path, "nvmlDeviceGetUUID")?,
            )
        };
        // SAFETY: takes nothing, and may be called by several users of one process: NVML counts them.
        let status = unsafe { init() };
        if status != SUCCESS {
            return Err(Unavailable::new(
                format!("NVML does not start: {}", meaning(status)),
                "make `nvidia-smi` work first; after an update of the driver that takes a reboot",
            ));
        }
        // SAFETY: as above.
        Ok(unsafe {
            Self {
                shutdown,
                count,
                handle,
                uuid,
                name: find(&code, "nvmlDeviceGetName"),
                driver: find(&code, "nvmlSystemGetDriverVersion"),
                version: find(&code, "nvmlSystemGetNVMLVersion"),
                energy: find(&code, "nvmlDeviceGetTotalEnergyConsumption"),
                power: find(&code, "nvmlDeviceGetPowerUsage"),
                fields: find(&code, "nvmlDeviceGetFieldValues"),
                memory: find(&code, "nvmlDeviceGetMemoryInfo"),
                utilisation: find(&code, "nvmlDeviceGetUtilizationRates"),
                temperature: find(&code, "nvmlDeviceGetTemperature"),
                clock: find(&code, "nvmlDeviceGetClockInfo"),
                power_limit: find(&code, "nvmlDeviceGetEnforcedPowerLimit"),
                default_limit: find(&code, "nvmlDeviceGetPowerManagementDefaultLimit"),
                // The same bits; the older name is going away.
                throttle: find(&code, "nvmlDeviceGetCurrentClocksEventReasons")
                    .or_else(|| find(&code, "nvmlDeviceGetCurrentClocksThrottleReasons")),
                architecture: find(&code, "nvmlDeviceGetArchitecture"),
                pci: find(&code, "nvmlDeviceGetPciInfo_v3"),
                mig_mode: find(&code, "nvmlDeviceGetMigMode"),
                processes: ["Compute", "Graphics"].map(|of| {
                    let symbol = |version| format!("nvmlDeviceGet{of}RunningProcesses_{version}");
                    find(&code, &symbol("v3")).or_else(|| find(&code, &symbol("v2")))
                }),
                by_uuid: find(&code, "nvmlDeviceGetHandleByUUID"),
                mig_holder: find(&code, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle"),
                _code: code,
            }
        })
    }

    /// The boards. One that this process may not use, and one that fell off the bus, runs nothing of ours: no reason to fail.
    pub(super) fn boards(&self) -> Result<Boards, String> {
        // SAFETY: `count` takes a pointer to an unsigned int.
        let count = get(|out| unsafe { (self.count)(out) }).map_err(meaning)?;
        let mut boards = Boards { open: Vec::new(), closed: Vec::new() };
        for index in 0..count {
            let mut board = Board(std::ptr::null_mut());
            // SAFETY: `handle` takes an index below the count and a pointer to a handle.
            match unsafe { (self.handle)(index, &mut board) } {
                SUCCESS => boards.open.push((index, board)),
                status @ (NO_PERMISSION | GPU_IS_LOST) => boards.closed.push((index, meaning(status))),
                status => return Err(format!("board {index}: {}", meaning(status))),
            }
        }
        Ok(boards)
    }

    /// The driver's version.
    pub(super) fn driver(&self) -> Option<String> {
        let driver = self.driver?;
        // SAFETY: takes a buffer and its length.
        text(|buffer, length| unsafe { driver(buffer, length) })
    }

    /// The library's own version.
    pub(super) fn version(&self) -> Option<String> {
        let version = self.version?;
        // SAFETY: as for `driver`.
        text(|buffer, length| unsafe { version(buffer, length) })
    }

    /// The board's identity, the same after a reboot and for every process.
    pub(super) fn uuid(&self, board: Board) -> Option<String> {
        // SAFETY: takes a handle that `handle` gave, a buffer and its length.
        text(|buffer, length| unsafe { (self.uuid)(board, buffer, length) })
    }

    /// The board's marketing name.
    pub(super) fn name(&self, board: Board) -> Option<String> {
        let name = self.name?;
        // SAFETY: as for `uuid`.
        text(|buffer, length| unsafe { name(board, buffer, length) })
    }

    /// Joules since the driver was loaded.
    pub(super) fn energy(&self, board: Board) -> Option<f64> {
        Some(self.get(board, self.energy?)? as f64 * 1e-3)
    }

    /// Watts now.
    pub(super) fn power_instant(&self, board: Board) -> Option<f64> {
        let [power] = self.fields(board, [FIELD_POWER_INSTANT]);
        Some(power? as f64 * 1e-3)
    }

    /// Joules and watts as above, by one call.
    pub(super) fn energy_and_power(&self, board: Board) -> (Option<f64>, Option<f64>) {
        let [power, energy] = self.fields(board, [FIELD_POWER_INSTANT, FIELD_TOTAL_ENERGY]);
        (energy.map(|mj| mj as f64 * 1e-3), power.map(|mw| mw as f64 * 1e-3))
    }

    fn fields<const N: usize>(&self, board: Board, ids: [c_uint; N]) -> [Option<c_ulonglong>; N] {
        let Some(fields) = self.fields else { return [None; N] };
        let mut values = ids.map(|field_id| FieldValue { field_id, ..FieldValue::default() });
        // SAFETY: takes a handle, and as many fields as it is told.
        let status = unsafe { fields(board, N as c_int, values.as_mut_ptr()) };
        values.map(|field| match field.value_type {
            _ if status != SUCCESS || field.status != SUCCESS => None,
            1 => Some(field.value & 0xffff_ffff), // NVML_VALUE_TYPE_UNSIGNED_INT, which is what drivers say of power
            2 | 3 => Some(field.value),           // unsigned long, unsigned long long
            _ => None,
        })
    }

    /// Watts over the last second on Ampere and newer, GA100 excepted; watts now on older boards.
    pub(super) fn power_average(&self, board: Board) -> Option<f64> {
        Some(f64::from(self.get(board, self.power?)?) * 1e-3)
    }

    /// Bytes in use.
    pub(super) fn memory_used(&self, board: Board) -> Option<f64> {
        Some(self.get(board, self.memory?)?.used as f64)
    }

    /// Bytes there are.
    pub(super) fn memory_total(&self, board: Board) -> Option<f64> {
        Some(self.get(board, self.memory?)?.total as f64)
    }

    /// Part of the last sampling period in which a kernel ran, 0 to 1.
    pub(super) fn utilisation(&self, board: Board) -> Option<f64> {
        Some(f64::from(self.get(board, self.utilisation?)?.gpu) / 100.0)
    }

    /// Part of the last sampling period in which memory was read or written, 0 to 1.
    pub(super) fn memory_utilisation(&self, board: Board) -> Option<f64> {
        Some(f64::from(self.get(board, self.utilisation?)?.memory) / 100.0)
    }

    /// Degrees Celsius.
    pub(super) fn temperature(&self, board: Board) -> Option<f64> {
        let temperature = self.temperature?;
        // SAFETY: takes a handle, which sensor, and a pointer to an unsigned int.
        get(|out: &mut c_uint| unsafe { temperature(board, TEMPERATURE_OF_GPU, out) }).ok().map(f64::from)
    }

    /// Hertz of the compute units.
    pub(super) fn clock(&self, board: Board) -> Option<f64> {
        self.megahertz(board, CLOCK_SM)
    }

    /// Hertz of the memory.
    pub(super) fn memory_clock(&self, board: Board) -> Option<f64> {
        self.megahertz(board, CLOCK_MEMORY)
    }

    fn megahertz(&self, board: Board, domain: c_uint) -> Option<f64> {
        let clock = self.clock?;
        // SAFETY: takes a handle, which clock, and a pointer to an unsigned int.
        let mhz = get(|out: &mut c_uint| unsafe { clock(board, domain, out) }).ok()?;
        // As a float: 4,295 MHz are more hertz than an unsigned int holds.
        Some(f64::from(mhz) * 1e6)
    }

    /// Watts it may draw, by whichever limit is lowest.
    pub(super) fn power_limit(&self, board: Board) -> Option<f64> {
        Some(f64::from(self.get(board, self.power_limit?)?) * 1e-3)
    }

    /// Watts it may draw unless somebody sets another limit.
    pub(super) fn default_limit(&self, board: Board) -> Option<f64> {
        Some(f64::from(self.get(board, self.default_limit?)?) * 1e-3)
    }

    /// The bits of why the clocks are held down; those in use are far below the 53 that a float holds.
    pub(super) fn throttle(&self, board: Board) -> Option<f64> {
        Some(self.get(board, self.throttle?)? as f64)
    }

    /// `nvmlDeviceArchitecture_t`, if the library knows it.
    pub(super) fn architecture(&self, board: Board) -> Option<u32> {
        self.get(board, self.architecture?).filter(|architecture| *architecture != c_uint::MAX)
    }

    /// Where the board is plugged in.
    pub(super) fn place(&self, board: Board) -> Option<Place> {
        let PciInfo { domain, bus, device, .. } = self.get(board, self.pci?)?;
        Some(Place { domain, bus, device })
    }

    /// Whether the board is split into instances; `None` if it cannot be.
    pub(super) fn mig(&self, board: Board) -> Option<bool> {
        let (mode, mut pending) = (self.mig_mode?, 0);
        // SAFETY: takes a handle and two pointers to unsigned ints.
        get(|now: &mut c_uint| unsafe { mode(board, now, &mut pending) }).ok().map(|now| now != 0)
    }

    /// The UUID of the board that holds a MIG instance.
    pub(super) fn holder(&self, instance: &str) -> Option<String> {
        let (by_uuid, mig_holder) = (self.by_uuid?, self.mig_holder?);
        let uuid = CString::new(instance).ok()?;
        let (mut part, mut whole) = (Board(std::ptr::null_mut()), Board(std::ptr::null_mut()));
        // SAFETY: takes a text that ends in a zero and a pointer to a handle.
        let found = unsafe { by_uuid(uuid.as_ptr(), &mut part) };
        // SAFETY: takes a handle, which was just given, and a pointer to another; it is asked only for one that was found.
        let held = found == SUCCESS && unsafe { mig_holder(part, &mut whole) } == SUCCESS;
        if held { self.uuid(whole) } else { None }
    }

    /// The processes that compute or draw on the board. Slow: never while sampling.
    pub(super) fn processes(&self, board: Board) -> Vec<u32> {
        self.processes.iter().flatten().flat_map(|list| processes(*list, board)).collect()
    }

    fn get<T: Default>(&self, board: Board, function: Get<T>) -> Option<T> {
        // SAFETY: a `Get<T>` takes a handle and a pointer to a `T`; the handle is of this library.
        get(|out| unsafe { function(board, out) }).ok()
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: pairs with the init in `open`; no handle is used after this. A failure leaves nothing to be done.
        unsafe { (self.shutdown)() };
    }
}

/// # Safety
/// `F` must be the type of the function of that name.
unsafe fn find<F: Copy>(code: &libloading::Library, symbol: &str) -> Option<F> {
    // SAFETY: handed on; the pointer is kept beside `code`, which outlives it.
    unsafe { code.get::<F>(symbol) }.ok().map(|f| *f)
}

/// # Safety
/// As for [`find`].
unsafe fn need<F: Copy>(code: &libloading::Library, path: &str, symbol: &str) -> Result<F, Unavailable> {
    // SAFETY: handed on.
    unsafe { find(code, symbol) }.ok_or_else(|| {
        Unavailable::new(
            format!("{path} has no function {symbol}: it is not NVML, or too old"),
            "install a current NVIDIA driver",
        )
    })
}

fn processes(list: GetProcesses, board: Board) -> Vec<u32> {
    let mut count = 0;
    // SAFETY: takes a handle, and asks only for the count where there is room for none.
    if unsafe { list(board, &mut count, std::ptr::null_mut()) } != INSUFFICIENT_SIZE {
        return Vec::new(); // none, or not to be had
    }
    // Some more, for those that come in between.
    let mut room: Vec<ProcessRoom> = vec![[0; 4]; count as usize + 16];
    count = room.len() as c_uint;
    // SAFETY: takes a handle and room for as many processes as it is told.
    if unsafe { list(board, &mut count, room.as_mut_ptr()) } != SUCCESS {
        return Vec::new();
    }
    room.as_flattened().chunks(PROCESS_WORDS).take(count as usize).map(|words| words[0] as u32).collect()
}

fn get<T: Default>(call: impl FnOnce(&mut T) -> Status) -> Result<T, Status> {
    let mut value = T::default();
    match call(&mut value) {
        SUCCESS => Ok(value),
        status => Err(status),
    }
}

fn text(call: impl FnOnce(*mut c_char, c_uint) -> Status) -> Option<String> {
    let mut buffer = [0u8; TEXT];
    let status = call(buffer.as_mut_ptr().cast(), TEXT as c_uint);
    let text = CStr::from_bytes_until_nul(&buffer).ok()?.to_string_lossy();
    (status == SUCCESS && !text.is_empty()).then(|| text.into_owned())
}

fn cannot_load(path: &str, error: &libloading::Error) -> Unavailable {
    let said = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    // The loader says the same of a library that is there and needs another one that is not; then it names that one.
    let missing = said.contains(path) && said.to_lowercase().contains("no such file");
    Unavailable::new(
        if missing { format!("{path} not found") } else { format!("cannot load {path}: {said}") },
        "install the NVIDIA driver, or give --source-param nvml.library=PATH",
    )
}

/// What a status says to a person; `nvmlErrorString` would need a library that works.
fn meaning(status: Status) -> String {
    let text = match status {
        NO_PERMISSION => "no permission",
        9 => "the NVIDIA kernel driver is not loaded",
        GPU_IS_LOST => "a board fell off the bus",
        18 => "the library and the kernel driver are of different versions",
        _ => "it failed",
    };
    format!("{text} (NVML status {status})")
}
