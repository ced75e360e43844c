//! Pretended hardware, so that everything above can be checked: devices of a scenario file, whose truth is known, or the sensors
//! of a recorded run, played back.

mod recorded;
mod scenario;

use self::recorded::Recorded;
use self::scenario::Scenario;
use super::{Driver, Settings, Source, Unavailable, When};
use wattle_core::registry::{About, Opt};

pub(super) const DRIVER: Driver = Driver {
    about: About {
        name: "replay",
        about: "pretended devices with the power a scenario file says, or the sensors of a recorded run",
        options: &[
            Opt { key: "scenario", about: "path of the JSON file" },
            Opt { key: "run", about: "path of the run folder whose readings are played back" },
            Opt {
                key: "speed",
                about: "how many times faster than it was recorded a run is played back (1)",
            },
        ],
    },
    when: When::Named,
    open,
};

const FIX: &str =
    "give --source-param replay.scenario=FILE or replay.run=FOLDER; docs/guide.md#replay shows both";

fn open(settings: &Settings) -> Result<Box<dyn Source>, Unavailable> {
    let param = |key: &str| settings.params.get(key).map(String::as_str);
    match (param("scenario"), param("run"), param("speed")) {
        (Some(_), None, Some(_)) => Err(Unavailable::new(
            "replay.speed is for a recorded run",
            "leave it out: the steps of a scenario are where its file says",
        )),
        (Some(path), None, None) => Ok(Box::new(Scenario::open(path)?)),
        (None, Some(run), speed) => {
            let speed = speed.map_or(Ok(1.0), str::parse).unwrap_or(f64::NAN);
            Ok(Box::new(Recorded::open(settings, run, speed)?))
        }
        (Some(_), Some(_), _) => {
            Err(Unavailable::new("both a scenario and a run are named", "give one of them"))
        }
        (None, None, _) => Err(Unavailable::new("neither a scenario file nor a run is named", FIX)),
    }
}
