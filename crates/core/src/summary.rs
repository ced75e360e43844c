//! `summary.json` and `run.json`: what a finished run says about itself, and what it was.

use crate::calibration::Attribution;
use crate::command::{Gauge, Repetition};
use crate::cost::Origin;
use crate::estimate::Estimate;
use crate::metrics::Metric;
use crate::qualify::Qualification;
use crate::sensor::{Device, DeviceKind, Perimeter, Sensor};
use crate::spec::Spec;
use crate::steady::Steady;
use crate::time::Span;
use crate::units::Joules;
use crate::warning::Warning;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of the run folder; a reader refuses a greater one.
pub const SCHEMA_VERSION: u32 = 1;

/// The machine.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Host {
    /// Operating system with its version.
    pub os_name: String,
    /// Version of the distribution, where it says one.
    pub os_version: String,
    /// Kernel release.
    pub kernel_version: String,
    /// Name of the machine.
    pub host_name: String,
    /// CPU model.
    pub cpu_brand: String,
    /// Logical CPUs.
    pub cpu_count: u64,
    /// Main memory in bytes.
    pub memory_bytes: u64,
}

/// The model as its client describes it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ModelInfo {
    /// The name requests carry.
    pub name: String,
    /// Parameters, where known.
    pub parameters: Option<u64>,
    /// Weight format, where known.
    pub format: Option<String>,
    /// Digest of the weights, where they are at hand.
    pub sha256: Option<String>,
    /// The engine and its version, where known.
    pub engine: Option<String>,
}

/// Text made fit for a file name: letters, digits, `.`, `-`; at most `longest` of them.
pub fn slug(text: &str, longest: usize) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            c if c.is_ascii_alphanumeric() || c == '.' => out.push(c),
            _ if out.ends_with('-') => {}
            _ => out.push('-'),
        }
    }
    out.truncate(longest);
    let trimmed = out.trim_matches(['-', '.']);
    if trimmed.is_empty() { "unnamed".into() } else { trimmed.into() }
}

/// Short name of a machine: its accelerators with their number, else its CPU.
pub fn hardware_label(host: &Host, sensors: &[Sensor]) -> String {
    let mut gpus: Vec<(&str, Vec<&str>)> = Vec::new();
    for device in sensors.iter().map(|s| &s.device).filter(|d| d.kind == DeviceKind::Gpu) {
        match gpus.iter_mut().find(|(name, _)| *name == device.name) {
            Some((_, ids)) if ids.contains(&device.id.as_str()) => {}
            Some((_, ids)) => ids.push(&device.id),
            None => gpus.push((&device.name, vec![&device.id])),
        }
    }
    if gpus.is_empty() {
        // "Processor", "with …" and clock speeds tell nobody anything.
        let brand = host.cpu_brand.replace("(R)", "").replace("(TM)", "").replace("Processor", "");
        let brand = brand.split(" @ ").next().unwrap_or_default().trim().to_owned();
        return slug(&format!("{brand} {}cpu", host.cpu_count), 40);
    }
    let names: Vec<String> = gpus.iter().map(|(name, ids)| format!("{}x{name}", ids.len())).collect();
    slug(&names.join(" "), 40)
}

/// One source as it was opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceInfo {
    /// Its name.
    pub name: String,
    /// Why it is not read, if it is not.
    pub unavailable: Option<String>,
    /// What would make it readable.
    pub fix: Option<String>,
    /// What else it says about itself: driver version, places of boards.
    #[serde(default)]
    pub facts: BTreeMap<String, String>,
}

/// `run.json`: written once, before the first request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunInfo {
    /// Version of the folder.
    pub schema_version: u32,
    /// Unique id of the run.
    pub run_id: String,
    /// When it was made (RFC 3339, UTC).
    pub created: String,
    /// Version of wattle.
    pub version: String,
    /// What was asked for.
    pub spec: Spec,
    /// How many queries that is; 0 of a command.
    pub queries: u64,
    /// Name of the dataset, for people.
    pub dataset_name: Option<String>,
    /// SHA-256 over the exact prompts, in order.
    pub dataset_sha256: Option<String>,
    /// Folder in which a command is run.
    #[serde(default)]
    pub working_dir: Option<String>,
    /// The scorer used, if any.
    pub scorer: Option<String>,
    /// The machine.
    pub host: Host,
    /// Its short name, as in the folder's.
    pub hardware_label: String,
    /// The model.
    pub model: Option<ModelInfo>,
    /// Sources, read or not.
    pub sources: Vec<SourceInfo>,
    /// Sensors; `readings.parquet` has them by name.
    pub sensors: Vec<Sensor>,
    /// What a first look at the sensors showed: how often they change, whether counter and power agree.
    #[serde(default)]
    pub qualification: Vec<Qualification>,
    /// Names of the sensors whose sum is the run's energy.
    pub panel: Vec<String>,
    /// What that sum covers.
    pub perimeter: Option<Perimeter>,
    /// By what that sum is split among requests; `None` without energy, and of a command.
    #[serde(default)]
    pub attribution: Option<Attribution>,
}

/// `summary.json`: written when the run ends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Version of the folder.
    pub schema_version: u32,
    /// Unique id of the run.
    pub run_id: String,
    /// From the first request sent to the last one done, or from the first start of the command to its last end, in the last
    /// session.
    pub span: Option<Span>,
    /// The same for every session, by number; their stamps compare only within one boot.
    pub sessions: BTreeMap<u32, Span>,
    /// Whether every query was asked, or the command run as often as it should.
    pub complete: bool,
    /// Name of the model.
    pub model: Option<String>,
    /// Id of the dataset.
    pub dataset: Option<String>,
    /// Name of the dataset, for people.
    pub dataset_name: Option<String>,
    /// How answers were judged, if they were.
    pub scorer: Option<String>,
    /// Short name of the machine.
    pub hardware_label: String,
    /// What the energy covers.
    pub energy_perimeter: Option<Perimeter>,
    /// Where the costs come from by which it is split among requests.
    #[serde(default)]
    pub attribution: Option<Origin>,
    /// When this was written (RFC 3339, UTC).
    pub generated_at: String,
    /// Queries asked.
    pub total_queries: u64,
    /// Folder of the run, as it was given.
    pub output_dir: String,
    /// The machine.
    pub system_info: Host,
    /// Names of the accelerators.
    pub gpu_info: Vec<String>,
    /// Versions of what took part.
    pub versions: BTreeMap<String, String>,
    /// What was asked for.
    pub config: Spec,
    /// What to know before reading on.
    pub warnings: Vec<WarningText>,
    /// Every metric with its interval.
    pub metrics: BTreeMap<String, Metric>,
    /// The part of a run of queries in which it was in steady state; `None` if it is too short to tell.
    #[serde(default)]
    pub steady: Option<Steady>,
    /// Energy of the measured spans by device.
    #[serde(default)]
    pub devices: Vec<DeviceEnergy>,
    /// The same by perimeter, as far as sensors reach.
    #[serde(default)]
    pub perimeters: BTreeMap<Perimeter, Estimate<Joules>>,
    /// What else was used meanwhile.
    #[serde(default)]
    pub resources: Resources,
    /// Every run of the command, warm-up included.
    #[serde(default)]
    pub repetitions: Vec<RepetitionEnergy>,
    /// Phases that the command marked, by name.
    #[serde(default)]
    pub phases: BTreeMap<String, PhaseEnergy>,
    /// Figures that the command gave, by name.
    #[serde(default)]
    pub gauges: BTreeMap<String, Gauge>,
}

impl Summary {
    /// What it is of, on one line: the model and the dataset, or the command.
    pub fn title(&self) -> String {
        if let (Some(model), Some(dataset)) = (&self.model, &self.dataset_name) {
            return format!("{model} on {dataset}");
        }
        let quoted = |word: &String| {
            let plain = |c: char| c.is_alphanumeric() || "-_./=:,+@%".contains(c);
            let shown: String = word.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            if !word.is_empty() && word.chars().all(plain) {
                shown
            } else {
                format!("'{}'", shown.replace('\'', "'\\''"))
            }
        };
        let whole = self.config.command.iter().map(quoted).collect::<Vec<_>>().join(" ");
        let start: String = whole.chars().take(LONGEST_TITLE).collect();
        if start.len() < whole.len() { start + " …" } else { whole }
    }
}

/// More of a command is in `run.json`.
const LONGEST_TITLE: usize = 200;

/// What one device drew.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceEnergy {
    /// Which.
    #[serde(flatten)]
    pub device: Device,
    /// The sensor that says so.
    pub sensor: String,
    /// How much; `None` if it said nothing.
    pub energy: Option<Estimate<Joules>>,
}

/// One run of the command, and what it drew.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RepetitionEnergy {
    /// The run.
    #[serde(flatten)]
    pub repetition: Repetition,
    /// Its energy, all devices of the perimeter.
    pub energy: Option<Estimate<Joules>>,
}

/// All phases of one name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PhaseEnergy {
    /// How many there were.
    pub count: u64,
    /// How long they were together.
    pub seconds: f64,
    /// Their energy, all devices of the perimeter.
    pub energy: Option<Estimate<Joules>>,
}

/// What was used while the measured work went on, in the words of the run monitor; to one decimal. With several boards, means and
/// maxima are over boards.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Resources {
    /// Most memory in use on any board, in MiB.
    pub peak_vram_mb: Option<f64>,
    /// Most memory that JAX says it held, in MiB, from the gauge `jax_peak_bytes`; absent unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jax_peak_bytes_mb: Option<f64>,
    /// Compute utilisation, in per cent.
    pub gpu_util_mean_pct: Option<f64>,
    /// The highest seen.
    pub gpu_util_max_pct: Option<f64>,
    /// Memory utilisation, in per cent; absent where unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_util_mean_pct: Option<f64>,
    /// The highest seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_util_max_pct: Option<f64>,
    /// Power of a board, in watts.
    pub power_watts_mean: Option<f64>,
    /// The highest seen.
    pub power_watts_max: Option<f64>,
    /// CPU time in user mode, of all CPUs, in per cent.
    pub cpu_usr_mean_pct: Option<f64>,
    /// CPU time with nothing to do, of all CPUs, in per cent.
    pub cpu_idle_mean_pct: Option<f64>,
    /// CPU seconds of the command, or of the server that was started for the run, and everything it started.
    pub tree_cpu_s: Option<f64>,
    /// Most memory that these held together, in MiB; pages they share count in each.
    pub tree_peak_rss_mb: Option<f64>,
}

/// A warning with its text, so that a reader needs no table of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WarningText {
    /// What it is.
    #[serde(flatten)]
    pub warning: Warning,
    /// What it says.
    pub text: String,
}

impl From<Warning> for WarningText {
    fn from(warning: Warning) -> Self {
        let text = warning.to_string();
        Self { warning, text }
    }
}

impl Resources {
    /// The same with every figure changed by `f`.
    pub fn map(self, f: impl Fn(f64) -> f64) -> Self {
        let f = |x: Option<f64>| x.map(&f);
        Self {
            peak_vram_mb: f(self.peak_vram_mb),
            jax_peak_bytes_mb: f(self.jax_peak_bytes_mb),
            gpu_util_mean_pct: f(self.gpu_util_mean_pct),
            gpu_util_max_pct: f(self.gpu_util_max_pct),
            mem_util_mean_pct: f(self.mem_util_mean_pct),
            mem_util_max_pct: f(self.mem_util_max_pct),
            power_watts_mean: f(self.power_watts_mean),
            power_watts_max: f(self.power_watts_max),
            cpu_usr_mean_pct: f(self.cpu_usr_mean_pct),
            cpu_idle_mean_pct: f(self.cpu_idle_mean_pct),
            tree_cpu_s: f(self.tree_cpu_s),
            tree_peak_rss_mb: f(self.tree_peak_rss_mb),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_safe_file_names() {
        assert_eq!(slug("meta-llama/Llama-3.1-8B", 40), "meta-llama-Llama-3.1-8B");
        assert_eq!(slug("../../etc/passwd", 40), "etc-passwd");
        assert_eq!(slug("modèle ☃", 40), "mod-le");
        assert_eq!(slug("...", 40), "unnamed");
        assert_eq!(slug(&"x".repeat(99), 40).len(), 40);
    }

    #[test]
    fn a_machine_without_boards_is_named_by_its_cpu() {
        let host = Host { cpu_brand: "AMD EPYC 9R14 Processor".into(), cpu_count: 2, ..Host::default() };
        assert_eq!(hardware_label(&host, &[]), "AMD-EPYC-9R14-2cpu");
    }

    #[test]
    fn one_board_is_told_from_eight() {
        use crate::sensor::{Device, Kind, Quantity, Trust};
        let board = |i: usize, quantity| Sensor {
            name: format!("{i}"),
            source: "nvml".into(),
            device: Device { kind: DeviceKind::Gpu, id: format!("GPU-{i}"), name: "NVIDIA H100".into() },
            quantity,
            perimeter: Perimeter::Device,
            kind: Kind::Gauge,
            trust: Trust::Measured { gain: 0.05 },
            quantum: 0.0,
            averaged_s: 0.0,
        };
        let eight: Vec<Sensor> =
            (0..8).flat_map(|i| [board(i, Quantity::Power), board(i, Quantity::Temperature)]).collect();
        assert_eq!(hardware_label(&Host::default(), &eight), "8xNVIDIA-H100");
        assert_eq!(hardware_label(&Host::default(), &eight[..2]), "1xNVIDIA-H100");
    }
}
