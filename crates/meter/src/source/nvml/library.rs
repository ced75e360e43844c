//! The few functions of NVML that are used, found at run time. All of this source's unsafe code is in this file; what it
//! hands out is safe. Signatures, layouts and codes are those of `nvml.h`.
#![allow(unsafe_code)] // A C library cannot be called without.

use crate::source::Unavailable;
use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_longlong, c_uint, c_ulonglong, c_void};

/// The name under which every Linux driver installs it.
pub(super) const SONAME: &str = "libnvidia-ml.so.1";

type Status = c_int;
const SUCCESS: Status = 0;
const NO_PERMISSION: Status = 4;
const GPU_IS_LOST: Status = 15;

const FIELD_POWER_INSTANT: c_uint = 186;
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

type Get<T> = unsafe extern "C" fn(Board, *mut T) -> Status;
type GetText = unsafe extern "C" fn(Board, *mut c_char, c_uint) -> Status;

/// NVML, initialised; shut down when dropped.
pub(super) struct Library {
    shutdown: unsafe extern "C" fn() -> Status,
    count: unsafe extern "C" fn(*mut c_uint) -> Status,
    handle: unsafe extern "C" fn(c_uint, *mut Board) -> Status,
    uuid: GetText,
    name: Option<GetText>,
    driver: Option<unsafe extern "C" fn(*mut c_char, c_uint) -> Status>,
    energy: Option<Get<c_ulonglong>>,
    power: Option<Get<c_uint>>,
    fields: Option<unsafe extern "C" fn(Board, c_int, *mut FieldValue) -> Status>,
    memory: Option<Get<Memory>>,
    utilisation: Option<Get<Utilization>>,
    temperature: Option<unsafe extern "C" fn(Board, c_uint, *mut c_uint) -> Status>,
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
                energy: find(&code, "nvmlDeviceGetTotalEnergyConsumption"),
                power: find(&code, "nvmlDeviceGetPowerUsage"),
                fields: find(&code, "nvmlDeviceGetFieldValues"),
                memory: find(&code, "nvmlDeviceGetMemoryInfo"),
                utilisation: find(&code, "nvmlDeviceGetUtilizationRates"),
                temperature: find(&code, "nvmlDeviceGetTemperature"),
                _code: code,
            }
        })
    }

    /// The boards this process may use. One it may not, and one that fell off the bus, runs nothing of ours and is left out.
    pub(super) fn boards(&self) -> Result<Vec<Board>, String> {
        // SAFETY: `count` takes a pointer to an unsigned int.
        let count = get(|out| unsafe { (self.count)(out) }).map_err(meaning)?;
        let mut boards = Vec::new();
        for index in 0..count {
            let mut board = Board(std::ptr::null_mut());
            // SAFETY: `handle` takes an index below the count and a pointer to a handle.
            match unsafe { (self.handle)(index, &mut board) } {
                SUCCESS => boards.push(board),
                NO_PERMISSION | GPU_IS_LOST => {}
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
        let fields = self.fields?;
        let mut field = FieldValue { field_id: FIELD_POWER_INSTANT, ..FieldValue::default() };
        // SAFETY: takes a handle, and as many fields as it is told.
        let status = unsafe { fields(board, 1, &mut field) };
        let milliwatts = match field.value_type {
            1 => field.value & 0xffff_ffff, // NVML_VALUE_TYPE_UNSIGNED_INT, which is what drivers say
            2 | 3 => field.value,           // unsigned long, unsigned long long
            _ => return None,
        };
        (status == SUCCESS && field.status == SUCCESS).then_some(milliwatts as f64 * 1e-3)
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
