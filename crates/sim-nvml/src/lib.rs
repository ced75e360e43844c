//! A stand-in for `libnvidia-ml.so.1`. Tests only.
//!
//! Power is a function of `CLOCK_MONOTONIC` and energy its closed-form integral: every process sees the same counters, and
//! a test knows the joules of any window. Where power is to follow what a program does, that program says it ([`Live`]). What the boards do is a [`Scenario`], taken from the first of these that is there:
//! `<library>.json` beside the library as it was loaded, the file that `WATTLE_SIM_NVML` names, one board of 100 W.
//!
//! A test installs a copy of its own ([`Sim::install`]): the loader takes each copy for another library, so scenarios of tests
//! in one process do not meet, and no environment variable has to change under running threads.
//!
//! NVIDIA's Python binding, Zeus and CodeCarbon run on it unchanged (`benches/peers`): the folder goes into `LD_LIBRARY_PATH`.
//! A function of NVML that has no answer here is there and says "not supported".

mod abi;
mod live;
mod machine;
mod scenario;

pub use live::Live;
pub use scenario::{Board, Part, Scenario};

use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::io;
use std::path::{Path, PathBuf};

/// An installed stand-in.
#[derive(Debug)]
pub struct Sim {
    /// What to give as `nvml.library`.
    pub library: PathBuf,
    /// What its boards do.
    pub scenario: Scenario,
}

impl Sim {
    /// Puts a copy of the library, with `scenario` (JSON) beside it, into `folder`.
    pub fn install(folder: &Path, scenario: &str) -> io::Result<Sim> {
        let library = folder.join("libnvidia-ml.so.1");
        let parsed = Scenario::parse(scenario).map_err(io::Error::other)?.below(Some(folder));
        std::fs::copy(library_path(), &library)?;
        std::fs::write(beside(&library), scenario)?;
        Ok(Sim { library, scenario: parsed })
    }
}

/// Where cargo built the library, for any test that has this crate as a dependency.
///
/// # Panics
/// If it is not there.
pub fn library_path() -> PathBuf {
    let name = format!("{DLL_PREFIX}wattle_sim_nvml{DLL_SUFFIX}");
    let program = std::env::current_exe().expect("a running program has a path");
    // Tests run in target/<profile>/deps, other programs in the folder above it. A library beside those others is there only
    // if this crate was itself asked for, and may be older than the one in deps.
    let places = || program.ancestors().skip(1).take(2).flat_map(|d| [d.join("deps"), d.to_owned()]);
    places().map(|folder| folder.join(&name)).find(|path| path.is_file()).unwrap_or_else(|| {
        let tried: Vec<String> = places().map(|p| p.display().to_string()).collect();
        panic!(
            "no {name} in {}; cargo builds it for every package that has wattle-sim-nvml as a (dev-)dependency, \
             or by `cargo build -p wattle-sim-nvml`",
            tried.join(", ")
        )
    })
}

/// The scenario file that belongs to one copy of the library.
fn beside(library: &Path) -> PathBuf {
    let mut name = library.as_os_str().to_owned();
    name.push(".json");
    name.into()
}
