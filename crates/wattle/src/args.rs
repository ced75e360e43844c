//! The command line as text: what was typed, nothing opened yet. Every flag of [`SpecArgs`] is a key of the spec.

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What an answer from a language model costs, next to how good it is.
#[derive(Debug, Parser)]
#[command(
    name = "wattle",
    version,
    max_term_width = 110,
    after_help = "Start with:\n  wattle run          measure a small built-in model, nothing to install\n  wattle doctor       can energy be measured on this machine?\n  wattle exec -- CMD  what does this command draw?"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure a model: ask it questions, score the answers, meter the energy
    Run(Box<RunArgs>),
    /// Run any command and measure what it draws
    Exec(Box<ExecArgs>),
    /// Measure what work costs a model, so that the energy of requests in flight together can be told apart
    Calibrate(Box<CalibrateArgs>),
    /// Write the report of a run or a sweep as one HTML file
    Report(ReportArgs),
    /// Say which sensors this machine has, and how to get at the others
    Doctor(DoctorArgs),
    /// List what there is to choose from
    List(ListArgs),
}

#[derive(Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:
  wattle run                                            the built-in model on the built-in questions
  wattle run --model demo-300k --max-queries 500        a smaller model, all questions
  wattle run --client openai --url http://127.0.0.1:8000/v1 --dataset jsonl \\
      --dataset-param path=questions.jsonl --dataset-param prompt=question --scorer contains
  wattle run --client openai --url http://127.0.0.1:8000 --concurrency 64 --dataset synthetic \\
      --dataset-param input=512 --dataset-param output=128 --max-queries 1000
  wattle run --client openai --url http://127.0.0.1:8000 --rate 1,2,4,8 --duration-s 60 --slo ttft=500ms,itl=50ms
  wattle run --client ollama --model qwen3:4b --sweep concurrency
  wattle run --server preset=vllm --model Qwen/Qwen3-4B --concurrency 32
  wattle run --resume runs/NAME                         go on after a crash or Ctrl-C
  wattle run --from runs/NAME --seed 2                  the same again with another seed
  wattle run --format json > result.json                for programs

Every option but those under Result is also a key of wattle.toml (max_queries = 10) and an
environment variable (WATTLE_MAX_QUERIES=10, WATTLE_DATASET_PARAM=path=q.jsonl). Flags win over the environment, the environment over the file.
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 terminated."
)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) spec: SpecArgs,
    /// One run for each of several values of a setting (concurrency=1,2,4), or more and more of rate or concurrency until the
    /// server takes no more [alone: concurrency]
    #[arg(long, value_name = "KEY[=V,V…]", num_args = 0..=1, default_missing_value = "concurrency", help_heading = "Result", conflicts_with = "resume")]
    pub(crate) sweep: Option<String>,
    /// Folder in which the run's folder is made
    #[arg(long, env = "WATTLE_OUT", value_name = "DIR", default_value = "runs", help_heading = "Result")]
    pub(crate) out: PathBuf,
    /// Name of the run's folder instead of HARDWARE_MODEL_DATASET_ID
    #[arg(long, help_heading = "Result", conflicts_with = "resume")]
    pub(crate) name: Option<String>,
    /// Replace a run of that --name; everything in its folder is removed
    #[arg(long, requires = "name", help_heading = "Result")]
    pub(crate) overwrite: bool,
    /// Go on with this run; asks no question twice (--url, --client-param, --server, --retries, --max-errors and the timeouts may change)
    #[arg(long, value_name = "RUN", help_heading = "Result", conflicts_with_all = ["from", "config"])]
    pub(crate) resume: Option<PathBuf>,
    /// Start from the settings of this run
    #[arg(long, value_name = "RUN", help_heading = "Result")]
    pub(crate) from: Option<PathBuf>,
    /// Settings file instead of ./wattle.toml
    #[arg(long, value_name = "FILE", help_heading = "Result")]
    pub(crate) config: Option<PathBuf>,
    /// What to print
    #[arg(long, env = "WATTLE_FORMAT", value_enum, default_value_t, help_heading = "Result")]
    pub(crate) format: Format,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people
    #[default]
    Table,
    /// For programs; of a run, its summary.json
    Json,
}

/// The flags that say who answers.
#[derive(Debug, Default, Args, Serialize)]
pub(crate) struct ModelArgs {
    /// Who answers: see "wattle list clients" [default: embedded]
    #[arg(long, value_name = "ID", help_heading = "Model")]
    #[serde(skip_serializing_if = "Option::is_none")]
    client: Option<String>,
    /// Where the model server is
    #[arg(long, help_heading = "Model")]
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
    /// Built-in model, path to a GGUF file, or the name its server knows
    #[arg(long, value_name = "NAME|PATH", help_heading = "Model")]
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    /// Option of the client; may be repeated
    #[arg(long, value_name = "K=V", value_parser = pair, help_heading = "Model")]
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "as_map")]
    client_param: Vec<(String, String)>,
    /// Option of a server that is started for this run: command="…", or preset=vllm and more; may be repeated
    #[arg(long, value_name = "K=V", value_parser = pair, help_heading = "Model")]
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "as_map")]
    server: Vec<(String, String)>,
}

/// The flags that are keys of the spec. What is not given is left to weaker layers.
#[derive(Debug, Default, Args, Serialize)]
pub(crate) struct SpecArgs {
    #[command(flatten)]
    #[serde(flatten)]
    model: ModelArgs,
    /// What the model is told before every question
    #[arg(long, value_name = "TEXT", help_heading = "Model")]
    #[serde(skip_serializing_if = "Option::is_none")]
    system: Option<String>,
    /// At most this many tokens of answer [default: 256]
    #[arg(long, value_name = "N", help_heading = "Model")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
    /// Sampling temperature; 0 is greedy [default: 0]
    #[arg(long, value_name = "T", help_heading = "Model")]
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    /// What is asked: see "wattle list datasets" [default: builtin]
    #[arg(long, value_name = "ID", help_heading = "Questions")]
    #[serde(skip_serializing_if = "Option::is_none")]
    dataset: Option<String>,
    /// Option of the dataset; may be repeated
    #[arg(long, value_name = "K=V", value_parser = pair, help_heading = "Questions")]
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "as_map")]
    dataset_param: Vec<(String, String)>,
    /// At most this many questions
    #[arg(long, value_name = "N", help_heading = "Questions")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_queries: Option<u64>,
    /// How answers are judged: see "wattle list scorers" [default: as the dataset suggests]
    #[arg(long, value_name = "ID", help_heading = "Questions")]
    #[serde(skip_serializing_if = "Option::is_none")]
    scorer: Option<String>,
    /// Seed of the choice of questions and of sampling [default: 1]
    #[arg(long, value_name = "N", help_heading = "Questions")]
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    /// Begin every prompt with something of its own, so that no server finds it in a cache: true or false [default: true in sweeps and runs by time]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Questions")]
    #[serde(skip_serializing_if = "Option::is_none")]
    unique_prefix: Option<bool>,
    /// Requests in flight at once, at most [default: 1; with --rate any number]
    #[arg(long, value_name = "N", help_heading = "Load")]
    #[serde(skip_serializing_if = "Option::is_none")]
    concurrency: Option<u32>,
    /// Requests a second, whatever becomes of those before (open loop); several, 1,2,4, are one run each
    #[arg(long, value_name = "R", value_delimiter = ',', help_heading = "Load")]
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "first")]
    pub(crate) rate: Vec<f64>,
    /// How the gaps of --rate are spread: constant, poisson or gamma [default: poisson]
    #[arg(long, value_name = "KIND", help_heading = "Load")]
    #[serde(skip_serializing_if = "Option::is_none")]
    arrival: Option<String>,
    /// With --arrival gamma: 1 is as poisson, more comes in bursts, less is more even [default: 1]
    #[arg(long, value_name = "CV2", help_heading = "Load")]
    #[serde(skip_serializing_if = "Option::is_none")]
    burstiness: Option<f64>,
    /// The rate changes evenly to this one, in --ramp-s
    #[arg(long, value_name = "R", help_heading = "Load")]
    #[serde(skip_serializing_if = "Option::is_none")]
    ramp_to: Option<f64>,
    /// How long that takes, in seconds
    #[arg(long, value_name = "S", help_heading = "Load")]
    #[serde(skip_serializing_if = "Option::is_none")]
    ramp_s: Option<f64>,
    /// Requests come when this file says (open loop): JSON lines or CSV with a timestamp
    #[arg(long, value_name = "FILE", help_heading = "Load")]
    #[serde(skip_serializing_if = "Option::is_none")]
    trace: Option<String>,
    /// Send requests for this long, in seconds, the dataset over and over if it must be
    #[arg(long, value_name = "S", help_heading = "Load")]
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_s: Option<f64>,
    /// Keep the load up with further requests until the last measured one has ended
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", help_heading = "Load")]
    #[serde(skip_serializing_if = "Option::is_none")]
    cooldown: Option<bool>,
    /// What an answer must keep to, counted as goodput: ttft=500ms,itl=50ms,latency=5s
    #[arg(long, value_name = "K=TIME", value_parser = pair, value_delimiter = ',', help_heading = "Load")]
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "as_map")]
    slo: Vec<(String, String)>,
    /// Extra requests before the measured ones [default: 3, or 5 above 10 B parameters]
    #[arg(long, value_name = "N", help_heading = "Load")]
    #[serde(skip_serializing_if = "Option::is_none")]
    warmup: Option<u32>,
    /// A request that takes longer, in seconds, has failed [default: 600]
    #[arg(long, value_name = "S", help_heading = "Load")]
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout_s: Option<f64>,
    /// A server that takes longer to accept a connection, in seconds, is not there [default: 10]
    #[arg(long, value_name = "S", help_heading = "Load")]
    #[serde(skip_serializing_if = "Option::is_none")]
    connect_timeout_s: Option<f64>,
    /// A request whose first token takes longer, in seconds, has failed
    #[arg(long, value_name = "S", help_heading = "Load")]
    #[serde(skip_serializing_if = "Option::is_none")]
    first_token_timeout_s: Option<f64>,
    /// An answer of which nothing more came for so long, in seconds, has failed
    #[arg(long, value_name = "S", help_heading = "Load")]
    #[serde(skip_serializing_if = "Option::is_none")]
    stall_timeout_s: Option<f64>,
    /// Send a request that the server did not take (429, 503, no connection) again, so often [default: 2]
    #[arg(long, value_name = "N", help_heading = "Load")]
    #[serde(skip_serializing_if = "Option::is_none")]
    retries: Option<u32>,
    /// Give up after this many failures in a row; 0 never does [default: 10]
    #[arg(long, value_name = "N", help_heading = "Load")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_errors: Option<u64>,
    /// By what the energy of requests in flight together is split: auto (a calibration of this model, engine and device, if there is
    /// one), none (documented ratios), or a calibration file [default: auto]
    #[arg(long, value_name = "FILE|auto|none", value_parser = calibration, help_heading = "Energy")]
    #[serde(skip_serializing_if = "Option::is_none")]
    calibration: Option<String>,
    #[command(flatten)]
    #[serde(flatten)]
    meter: MeterArgs,
}

/// The flags that say how energy is metered.
#[derive(Debug, Default, Args, Serialize)]
pub(crate) struct MeterArgs {
    /// Where energy figures may come from: auto, measured or none [default: auto]
    #[arg(long, value_name = "MODE", help_heading = "Energy")]
    #[serde(skip_serializing_if = "Option::is_none")]
    energy: Option<String>,
    /// Read only this source; may be repeated: see "wattle list sources"
    #[arg(long, value_name = "ID", help_heading = "Energy")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    source: Vec<String>,
    /// Option of a source, as source.key=value; may be repeated
    #[arg(long, value_name = "S.K=V", value_parser = pair, help_heading = "Energy")]
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "as_map")]
    source_param: Vec<(String, String)>,
    /// Read sysfs and procfs below this folder: pretended hardware, and the run says so
    #[arg(long, value_name = "DIR", help_heading = "Energy")]
    #[serde(skip_serializing_if = "Option::is_none")]
    root: Option<String>,
    /// How often counters are polled, in milliseconds [default: 5]
    #[arg(long, visible_alias = "interval", value_name = "MS", help_heading = "Energy")]
    #[serde(skip_serializing_if = "Option::is_none")]
    interval_ms: Option<f64>,
    /// Length of the idle baseline, before and again after: 10s, 500ms, 2m, or seconds; 0 is none [default: 1]
    #[arg(long, visible_alias = "idle", value_name = "TIME", value_parser = time, help_heading = "Energy")]
    #[serde(skip_serializing_if = "Option::is_none")]
    idle_s: Option<f64>,
}

#[derive(Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:
  wattle exec -- sleep 2                                what two seconds of nothing draw
  wattle exec --repeat 10 --warmup 1 -- ./bench.sh      mean and 95 % interval over ten runs
  wattle exec --name train -- python train.py --epochs 3
  wattle exec --energy measured -- make                 measure or refuse, never estimate
  wattle exec --resume runs/NAME                        the repetitions that a crash left out

The command runs as it would without wattle: same terminal, same output, same exit code (128 + N after
signal N). The result is printed on stderr, with --format json on stdout after the command's own output;
runs/NAME/summary.json holds the same.
A program can mark its phases and gauges by appending lines of JSON to the file that $WATTLE_LOG names:
  {\"type\":\"begin\",\"name\":\"prefill\"}   {\"type\":\"end\",\"name\":\"prefill\"}
  {\"type\":\"phase\",\"name\":\"load\",\"seconds\":1.2}   {\"type\":\"gauge\",\"name\":\"loss\",\"value\":0.3}
and gets the energy of each phase. $WATTLE_RESULT_DIR is a folder for files of its own.

Exit codes: the command's own; 1 wattle failed, 2 wrong usage, 126 not a program, 127 no such program."
)]
pub(crate) struct ExecArgs {
    #[command(flatten)]
    pub(crate) spec: CommandArgs,
    /// Go on with the next repetition when one fails
    #[arg(long)]
    pub(crate) keep_going: bool,
    /// Folder in which the run's folder is made
    #[arg(long, env = "WATTLE_OUT", value_name = "DIR", default_value = "runs", help_heading = "Result")]
    pub(crate) out: PathBuf,
    /// Name of the run's folder instead of HARDWARE_PROGRAM_ID
    #[arg(long, help_heading = "Result", conflicts_with = "resume")]
    pub(crate) name: Option<String>,
    /// Replace a run of that --name; everything in its folder is removed
    #[arg(long, requires = "name", help_heading = "Result")]
    pub(crate) overwrite: bool,
    /// Run the repetitions that are left of this run, as its run.json says
    #[arg(long, value_name = "RUN", help_heading = "Result", conflicts_with_all = ["command", "config", "repeat", "warmup", "energy", "source", "source_param", "root", "interval_ms", "idle_s"])]
    pub(crate) resume: Option<PathBuf>,
    /// Settings file instead of ./wattle.toml
    #[arg(long, value_name = "FILE", help_heading = "Result")]
    pub(crate) config: Option<PathBuf>,
    /// What to print
    #[arg(long, env = "WATTLE_FORMAT", value_enum, default_value_t, help_heading = "Result")]
    pub(crate) format: Format,
}

/// The flags of `exec` that are keys of the spec.
#[derive(Debug, Default, Args, Serialize)]
pub(crate) struct CommandArgs {
    /// The command and its arguments
    #[arg(trailing_var_arg = true, value_name = "CMD")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    command: Vec<String>,
    /// How often to run it [default: 1]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    repeat: Option<u64>,
    /// Runs before those that count [default: 0]
    #[arg(long, value_name = "K")]
    #[serde(skip_serializing_if = "Option::is_none")]
    warmup: Option<u32>,
    #[command(flatten)]
    #[serde(flatten)]
    meter: MeterArgs,
}

#[derive(Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:
  wattle calibrate --client openai --url http://127.0.0.1:8000/v1 --model Qwen/Qwen3-8B
  wattle calibrate --client ollama --model qwen3:4b --quick
  wattle calibrate --server preset=vllm --model Qwen/Qwen3-8B --thorough --max-concurrency 128
  wattle list calibrations                              what there is

Prompts of several lengths, several requests at once and several contexts are measured in random order, and
from what they draw comes what an iteration, a prompt token, a token and a look back at one cost above idle.
A run of the same model, engine and devices finds the result by itself. It takes about 40 seconds with
--quick, four minutes without, a quarter of an hour with --thorough; longer where the server or the sensors
are slow. Nobody else should use the server or the devices meanwhile.

Kept in $WATTLE_CALIBRATIONS, else in $XDG_DATA_HOME/wattle/calibrations, else in ~/.local/share/wattle/calibrations.
Exit codes: 0 done, 1 failed or refused, 2 wrong usage, 130 interrupted, 143 terminated."
)]
pub(crate) struct CalibrateArgs {
    #[command(flatten)]
    pub(crate) spec: CalibrateSpecArgs,
    /// Three repeats of few loads
    #[arg(long, help_heading = "Loads", conflicts_with = "thorough")]
    pub(crate) quick: bool,
    /// Nine repeats of many loads, each twice as long
    #[arg(long, help_heading = "Loads")]
    pub(crate) thorough: bool,
    /// As many requests at once, at most [default: 32, or 64 with --thorough]
    #[arg(long, value_name = "N", help_heading = "Loads", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) max_concurrency: Option<u32>,
    /// File (*.json) or folder for the result, instead of the usual folder
    #[arg(long, value_name = "FILE|DIR", help_heading = "Result")]
    pub(crate) out: Option<PathBuf>,
    /// Settings file instead of ./wattle.toml
    #[arg(long, value_name = "FILE", help_heading = "Result")]
    pub(crate) config: Option<PathBuf>,
    /// What to print
    #[arg(long, env = "WATTLE_FORMAT", value_enum, default_value_t, help_heading = "Result")]
    pub(crate) format: Format,
}

/// The flags of `calibrate` that are keys of the spec.
#[derive(Debug, Default, Args, Serialize)]
pub(crate) struct CalibrateSpecArgs {
    #[command(flatten)]
    #[serde(flatten)]
    model: ModelArgs,
    /// Seed of the order of loads and of their prompts [default: 1]
    #[arg(long, value_name = "N", help_heading = "Loads")]
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    /// A request that takes longer, in seconds, has failed [default: 600]
    #[arg(long, value_name = "S", help_heading = "Loads")]
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout_s: Option<f64>,
    #[command(flatten)]
    #[serde(flatten)]
    meter: MeterArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  wattle report runs/NAME --out report.html")]
pub(crate) struct ReportArgs {
    /// Folder of the run, or of the sweep
    pub(crate) run: PathBuf,
    /// File to write instead of report.html in that folder
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  wattle doctor
  wattle doctor --json | jq .measurable
  wattle doctor --source-param nvml.library=/usr/lib/libnvidia-ml.so.1

Exit codes: 0 energy can be measured, 1 it cannot.")]
pub(crate) struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Option of a source, as source.key=value; may be repeated
    #[arg(long, value_name = "S.K=V", value_parser = pair)]
    pub(crate) source_param: Vec<(String, String)>,
    /// Read sysfs and procfs below this folder
    #[arg(long, value_name = "DIR")]
    pub(crate) root: Option<PathBuf>,
    /// How long to look, in seconds
    #[arg(long, value_name = "S", default_value_t = 1.5, value_parser = moment)]
    pub(crate) seconds: f64,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  wattle list metrics\n  wattle list datasets --format json")]
pub(crate) struct ListArgs {
    /// What to list
    #[arg(value_enum)]
    pub(crate) kind: Listed,
    /// How to print it
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Listed {
    /// Who can be asked
    Clients,
    /// What can be asked
    Datasets,
    /// How answers are judged
    Scorers,
    /// Where energy comes from
    Sources,
    /// How commands are started
    Launchers,
    /// Servers that can be started for a run
    Servers,
    /// What the figures mean
    Metrics,
    /// Built-in models
    Models,
    /// What was calibrated
    Calibrations,
}

/// As long as a person waits.
fn moment(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|s| (0.1..=60.0).contains(s));
    seconds.ok_or_else(|| "must lie between 0.1 and 60".to_owned())
}

/// A time with its unit, or a number of seconds, which the spec checks.
fn time(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().or_else(|| wattle_core::slo::time(text).map(|t| t.get()));
    seconds.ok_or_else(|| "is no time; write for example 10s, 500ms or 2m".to_owned())
}

/// A file as seen from anywhere, or one of the two words.
fn calibration(text: &str) -> Result<String, String> {
    match text {
        "auto" | "none" => Ok(text.to_owned()),
        file => match std::path::absolute(file) {
            Ok(path) => Ok(path.display().to_string()),
            Err(e) => Err(e.to_string()),
        },
    }
}

/// `key=value`; the value may hold anything, commas and further `=` included.
fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("must be written KEY=VALUE".into()),
    }
}

fn first<S: serde::Serializer>(values: &[f64], serializer: S) -> Result<S::Ok, S::Error> {
    values.first().serialize(serializer)
}

fn as_map<S: serde::Serializer>(pairs: &[(String, String)], serializer: S) -> Result<S::Ok, S::Error> {
    pairs.iter().cloned().collect::<BTreeMap<_, _>>().serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_key_of_the_spec_is_a_flag_of_the_same_name_and_no_other() {
        let mut command = Cli::command();
        command.build();
        let not_spec =
            ["out", "name", "overwrite", "resume", "from", "config", "format", "help", "keep_going", "sweep"];
        let flags = |name: &str| -> Vec<String> {
            let all = command.find_subcommand(name).unwrap().get_arguments();
            let ids = all.map(|a| a.get_id().to_string());
            ids.filter(|id| !not_spec.contains(&id.as_str())).collect()
        };
        let mut flags: Vec<String> = [flags("run"), flags("exec")].concat();
        let mut keys = wattle_core::Spec::keys();
        flags.sort();
        flags.dedup();
        keys.sort();
        assert_eq!(flags, keys);
    }

    #[test]
    fn every_command_has_an_example() {
        for command in Cli::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("Example"), "{}", command.get_name());
        }
    }

    #[test]
    fn a_time_has_a_unit_or_is_in_seconds() {
        for (text, seconds) in [("10s", 10.0), ("500ms", 0.5), ("2m", 120.0), ("0.3", 0.3), ("0", 0.0)] {
            assert_eq!(time(text), Ok(seconds), "{text}");
        }
        assert!(time("soon").is_err() && time("5 parsecs").is_err());
        for flag in ["--idle", "--idle-s"] {
            let cli = Cli::try_parse_from(["wattle", "exec", flag, "500ms", "--", "true"]).unwrap();
            let Command::Exec(exec) = cli.command else { panic!("another command") };
            assert_eq!(exec.spec.meter.idle_s, Some(0.5), "{flag}");
        }
    }

    #[test]
    fn values_may_hold_commas_and_equal_signs() {
        assert_eq!(pair("path=a,b=c"), Ok(("path".into(), "a,b=c".into())));
        assert!(pair("=x").is_err() && pair("x").is_err());
    }
}
