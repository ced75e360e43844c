//! What every client promises, asked of each of them, with a server that knows what truly happened behind those that need one.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use std::sync::Arc;
use std::time::Duration;
use wattle_core::exchange::{Dated, Exchange, FailureClass, Outcome, Request, Role, Turn};
use wattle_lab::client::{self, Client, DRIVERS, Limits, Live, Settings, Verdict};
use wattle_meter::clock;
use wattle_sim_server::{Config, Server};

const LIMITS: Limits = Limits {
    connect: Duration::from_secs(5),
    first_token: None,
    stall: None,
    total: Duration::from_secs(60),
};

/// Every client there is, with its server if it has one.
fn all(limits: Limits) -> Vec<(&'static str, Option<Server>, Box<dyn Client>)> {
    let each = |driver: &client::Driver| {
        let name = driver.about.name;
        let server = (name != "embedded").then(|| {
            Server::start(Config { tokens: 40, ttft_ms: 20.0, itl_ms: 2.0, ..Config::default() }).unwrap()
        });
        let url = server.as_ref().map(Server::url);
        let settings = Settings { url, limits, ..Settings::default() };
        (name, server, client::open(name, &settings).unwrap())
    };
    DRIVERS.iter().map(each).collect()
}

fn request(model: &str, prompt: &str, max_tokens: u32) -> Request {
    let turns = vec![Turn { role: Role::User, content: prompt.to_owned() }];
    Request { model: model.into(), turns, max_tokens, exact: false, temperature: 0.0, seed: 1 }
}

/// Runs on one thread, as a run does.
fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

async fn ready(client: &dyn Client) -> String {
    client.health().await.unwrap();
    client.prepare(&|_| {}).await.unwrap().name
}

async fn ask(client: &dyn Client, request: &Request, live: Arc<Live>) -> (Verdict, Exchange) {
    let verdict = client.send(request, &live).await;
    (verdict, live.take())
}

#[test]
fn an_answer_has_its_stamps_in_order_and_as_many_tokens_as_it_says() {
    for (name, _server, client) in all(LIMITS) {
        block_on(async {
            let model = ready(client.as_ref()).await;
            let before = clock::now();
            let (verdict, e) = ask(client.as_ref(), &request(&model, "12+34=", 8), Live::now()).await;
            assert_eq!(verdict, Verdict::Final, "{name}");
            assert!(e.outcome.is_ok(), "{name}: {:?}", e.outcome);
            let first = e.first_token.unwrap();
            assert!(
                before <= e.due && e.due == e.sent && e.sent <= first && first <= e.done,
                "{name}: {e:?}"
            );
            assert!(e.done <= clock::now() && e.tokens.is_sorted() && e.tokens[0] == first, "{name}: {e:?}");
            let tokens = e.usage.completion.unwrap();
            assert!((1..=8).contains(&tokens), "{name}: the cap is kept to: {tokens}");
            assert_eq!(e.usage.from.map(|f| f.name()), Some("usage"), "{name}");
            assert!(!e.answer.is_empty() && e.usage.prompt.is_some() && e.attempts == 1, "{name}: {e:?}");
            client.close().await.unwrap();
        });
    }
}

#[test]
fn in_an_open_loop_a_request_keeps_the_moment_it_was_due() {
    for (name, _server, client) in all(LIMITS) {
        block_on(async {
            let model = ready(client.as_ref()).await;
            let due = clock::now();
            tokio::time::sleep(Duration::from_millis(30)).await;
            let (_, e) = ask(client.as_ref(), &request(&model, "7*8=", 4), Live::due(due)).await;
            assert_eq!(e.due, due, "{name}");
            assert!(e.sent.since(due).get() >= 0.03 && e.ttft().unwrap().get() >= 0.03, "{name}: {e:?}");
        });
    }
}

#[test]
fn a_request_that_is_dropped_is_cancelled_and_the_next_one_is_fine() {
    for (name, server, client) in all(LIMITS) {
        block_on(async {
            let model = ready(client.as_ref()).await;
            let (long, live) = (request(&model, "copy abcdefgh=", 4000), Live::now());
            let cut = tokio::time::timeout(Duration::from_millis(1), client.send(&long, &live)).await;
            if cut.is_err() {
                let Outcome::Failed { class, .. } = live.take().outcome else {
                    panic!("{name}: not cancelled")
                };
                assert_eq!(class, FailureClass::Cancelled, "{name}");
            }
            let (_, e) = ask(client.as_ref(), &request(&model, "7*8=", 4), Live::now()).await;
            assert!(e.outcome.is_ok(), "{name}: {:?}", e.outcome);
            // What was cancelled is not worked on any more.
            if let Some(server) = server {
                for _ in 0..200 {
                    if server.in_flight() == 0 {
                        return;
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                panic!("{name}: the server still works");
            }
        });
    }
}

#[test]
fn a_limit_ends_a_request_as_a_failure_of_time() {
    let limits = Limits { total: Duration::from_millis(2), ..LIMITS };
    for (name, _server, client) in all(limits) {
        block_on(async {
            let model = ready(client.as_ref()).await;
            let prompt = format!("copy {}=", "a".repeat(60));
            let (verdict, e) = ask(client.as_ref(), &request(&model, &prompt, 4000), Live::now()).await;
            // The embedded engine may be done by then.
            if let Outcome::Failed { class, error } = &e.outcome {
                assert_eq!((*class, verdict), (FailureClass::Timeout, Verdict::Final), "{name}");
                assert!(error.contains("timeout_s"), "{name}: {error}");
            } else {
                assert_eq!(name, "embedded");
            }
        });
    }
}

#[test]
fn many_at_once_each_get_their_own_answer() {
    for (name, server, client) in all(LIMITS) {
        block_on(async {
            let model = ready(client.as_ref()).await;
            client.connect(16).await;
            let prompts = (0..16).map(|i| format!("max {i} 3 2=")).collect::<Vec<_>>();
            let asked = prompts.iter().map(|prompt| {
                let (request, live, client) = (request(&model, prompt, 6), Live::now(), client.as_ref());
                async move { ask(client, &request, live).await.1 }
            });
            let answers = futures_util::future::join_all(asked).await;
            assert!(answers.iter().all(|e| e.outcome.is_ok()), "{name}: {answers:?}");
            if name == "embedded" {
                assert!(
                    answers.windows(2).all(|w| w[0].done <= w[1].sent || w[1].done <= w[0].sent),
                    "one at a time"
                );
            }
            if let Some(server) = server {
                assert!(server.connections() <= 17 && client.connections().is_some(), "{name}");
                assert!(answers.iter().all(|e| e.dated == Dated::Kernel), "{name}");
            }
        });
    }
}

#[test]
fn a_server_that_is_not_there_is_said_to_be_so_with_the_way_out() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for driver in DRIVERS.iter().filter(|d| d.about.name != "embedded") {
        let settings =
            Settings { url: Some(format!("http://{free}")), limits: LIMITS, ..Settings::default() };
        let client = client::open(driver.about.name, &settings).unwrap();
        let error = block_on(client.health()).unwrap_err().to_string();
        assert!(error.contains("no answer from") && error.contains("running"), "{error}");
        let (verdict, e) = block_on(ask(client.as_ref(), &request("m", "x", 2), Live::now()));
        assert_eq!(verdict, Verdict::Again(None), "it was not taken: {e:?}");
    }
}

/// HTTP/2 in clear text: many requests on one connection.
mod http2 {
    use super::*;
    use http_body_util::{BodyExt, StreamBody};
    use hyper::body::{Bytes, Frame, Incoming};
    use hyper::service::service_fn;
    use hyper::{Request as Asked, Response};
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    type Body = http_body_util::combinators::BoxBody<Bytes, Infallible>;

    async fn answer(asked: Asked<Incoming>) -> Result<Response<Body>, Infallible> {
        let models = asked.uri().path() == "/v1/models";
        let asked = asked.into_body().collect().await.unwrap().to_bytes();
        let text = String::from_utf8_lossy(&asked).into_owned();
        let pieces: Vec<String> = if models {
            vec![r#"{"data":[{"id":"m"}]}"#.into()]
        } else {
            // It says what it was asked, so that nobody gets another's answer.
            let prompt =
                serde_json::from_str::<serde_json::Value>(&text).unwrap()["messages"][0]["content"].clone();
            vec![
                format!("data: {{\"id\":\"a\",\"choices\":[{{\"delta\":{{\"content\":{prompt}}}}}]}}\n\n"),
                "data: {\"choices\":[{\"delta\":{\"content\":\"!\"},\"finish_reason\":\"stop\"}]}\n\n".into(),
                "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n".into(),
            ]
        };
        let stream = futures_util::stream::unfold(pieces.into_iter(), |mut rest| async move {
            let piece = rest.next()?;
            tokio::time::sleep(Duration::from_millis(5)).await;
            Some((Ok(Frame::data(Bytes::from(piece))), rest))
        });
        let kind = if models { "application/json" } else { "text/event-stream" };
        Ok(Response::builder()
            .header("content-type", kind)
            .body(BodyExt::boxed(StreamBody::new(stream)))
            .unwrap())
    }

    #[test]
    fn a_hundred_requests_share_a_connection_and_none_its_answer() {
        block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("http://{}", listener.local_addr().unwrap());
            let accepted = Arc::new(AtomicUsize::new(0));
            let counter = Arc::clone(&accepted);
            tokio::spawn(async move {
                while let Ok((socket, _)) = listener.accept().await {
                    counter.fetch_add(1, Ordering::SeqCst);
                    let serving = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    tokio::spawn(serving.serve_connection(TokioIo::new(socket), service_fn(answer)));
                }
            });
            let params = [("http".to_owned(), "2".to_owned())].into();
            let settings = Settings { url: Some(url), limits: LIMITS, params, ..Settings::default() };
            let client = client::open("openai", &settings).unwrap();
            assert_eq!(ready(client.as_ref()).await, "m");
            let asked = (0..150).map(|i| {
                let (request, client) = (request("m", &format!("question {i}"), 6), client.as_ref());
                async move { (i, ask(client, &request, Live::now()).await.1) }
            });
            for (i, e) in futures_util::future::join_all(asked).await {
                assert!(e.outcome.is_ok(), "{:?}", e.outcome);
                assert_eq!(e.answer, format!("question {i}!"));
                assert_eq!(
                    (e.usage.completion, e.dated),
                    (Some(2), Dated::Client),
                    "others' bytes date nothing"
                );
            }
            let connections = accepted.load(Ordering::SeqCst);
            assert!((1..=3).contains(&connections), "{connections} connections for 150 requests");
        });
    }
}
