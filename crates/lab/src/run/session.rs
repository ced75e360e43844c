//! One uninterrupted stretch of a run: idle baseline, warm-up, queries. A resumed run has several.

use super::desk::Desk;
use super::{Observer, Order, Progress, Target};
use crate::client::{Client, Place};
use crate::metering::Metering;
use crate::{LabError, Stop, StopCause};
use std::time::Duration;
use wattle_core::Warning;
use wattle_core::event::Event;
use wattle_core::exchange::Request;
use wattle_core::record::{Item, Score};
use wattle_core::summary::ModelInfo;
use wattle_meter::clock;
use wattle_store::RunDir;

/// Above this many parameters a model needs more warming (requirement L1).
const LARGE_MODEL: u64 = 10_000_000_000;
/// Warm-up answers need not be long.
const WARMUP_TOKENS: u32 = 16;

/// One uninterrupted stretch of a run.
pub(super) struct Session<'a> {
    pub(super) order: &'a Order,
    pub(super) client: &'a dyn Client,
    pub(super) model: &'a ModelInfo,
    pub(super) stop: &'a Stop,
    pub(super) past: &'a crate::folder::Past,
}

impl Session<'_> {
    pub(super) async fn hold(
        &self,
        dir: &RunDir,
        metering: Metering,
        observe: &mut Observer<'_>,
    ) -> Result<Option<StopCause>, LabError> {
        let spec = &self.order.spec;
        let mut desk = Desk::open(dir, self.past.sessions, self.order.census.items, metering, spec)?;
        if let Target::Existing { changes, .. } = &self.order.target {
            for change in changes.iter().filter(|c| !c.values.is_empty()) {
                desk.note(&Event::with("settings_changed", change.values.clone().into()))?;
            }
        }
        let result = tokio::select! {
            biased;
            cause = self.stop.wait() => Ok(Some(cause)),
            result = self.work(&mut desk, dir, observe) => result.map(|()| None),
        };
        // Trouble on the way out must not keep the books from being closed.
        let result = match result {
            Ok(Some(cause)) => desk.interrupted(observe).await.map(|()| Some(cause)),
            other => other,
        };
        if let Err(error) = self.client.close().await {
            let _ = desk.note(&Event::Warning(Warning::Close { error: error.to_string() }));
        }
        // Whatever happened, what had finished is saved.
        let closed = desk.close(self.client.place() == Place::Here, observe);
        result.and_then(|cause| closed.map(|()| cause))
    }

    async fn work(&self, desk: &mut Desk, dir: &RunDir, observe: &mut Observer<'_>) -> Result<(), LabError> {
        let spec = &self.order.spec;
        desk.first_readings().await?;
        if desk.meters() && spec.idle_s > 0.0 {
            observe(Progress::Stage("measuring the idle machine"));
            desk.idle(Duration::from_secs_f64(spec.idle_s), self.client.place() == Place::Here).await?;
        }
        observe(Progress::Stage("warming up"));
        self.warm_up(desk).await?;

        let total = self.order.census.items;
        observe(Progress::Start { run: dir.path().into(), total, done: self.past.done.len() });
        desk.start_queries(self.past.done.len());
        let began = clock::now();
        for item in self.order.dataset.items()? {
            let item = item?;
            if self.past.done.contains(item.index) {
                continue;
            }
            let request = self.request(&item.prompt, spec.max_tokens);
            let exchange = {
                let answer = self.client.send(&request, clock::now());
                desk.pump_while(answer, observe).await?
            };
            let score = self.score(&item, exchange.outcome.is_ok().then_some(exchange.answer.as_str()));
            desk.take(item, exchange, score, observe)?;
        }
        desk.settle_all(observe).await?;
        desk.note(&Event::phase("queries", clock::now().since(began).get()))?;
        Ok(())
    }

    async fn warm_up(&self, desk: &mut Desk) -> Result<(), LabError> {
        let large = self.model.parameters.is_some_and(|n| n > LARGE_MODEL);
        let count = self.order.spec.warmup.unwrap_or(if large { 5 } else { 3 });
        let began = clock::now();
        for i in 0..count {
            // An extra request, never an item of the dataset: its answer must not be in a cache.
            let request =
                self.request(&format!("warm up {i}"), WARMUP_TOKENS.min(self.order.spec.max_tokens));
            let exchange = desk.pump_while(self.client.send(&request, clock::now()), &mut |_| {}).await?;
            if let Some(error) = exchange.outcome.error() {
                desk.note(&Event::with("warmup_failed", serde_json::json!({ "error": error })))?;
            }
        }
        desk.note(&Event::phase("warmup", clock::now().since(began).get()))
    }

    fn request(&self, prompt: &str, max_tokens: u32) -> Request {
        let spec = &self.order.spec;
        Request {
            model: self.model.name.clone(),
            prompt: prompt.to_owned(),
            max_tokens,
            temperature: spec.temperature,
            seed: spec.seed,
        }
    }

    /// A failed query is a wrong one; a question without an expected answer has no score.
    fn score(&self, item: &Item, answer: Option<&str>) -> Option<Score> {
        let (name, scorer) = self.order.scorer.as_ref()?;
        let expected = item.expected.as_deref()?;
        Some(Score { value: answer.map_or(0.0, |a| scorer.score(expected, a)), scorer: name.clone() })
    }
}
