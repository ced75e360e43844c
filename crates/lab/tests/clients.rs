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

mod load {
    use super::*;
    use std::io::{Read, Write};
    use wattle_core::wire::prometheus::Load;
    use wattle_core::wire::timings;
    use wattle_sim_server::EngineConfig;

    fn openai(url: String) -> Box<dyn Client> {
        client::open("openai", &Settings { url: Some(url), limits: LIMITS, ..Settings::default() }).unwrap()
    }

    /// A server that says `answer` to whatever it is asked, once, and what it was asked.
    fn says(answer: &'static [u8]) -> (String, std::thread::JoinHandle<String>) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let serving = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            let mut asked = [0; 4096];
            let length = socket.read(&mut asked).unwrap();
            // The client hangs up on what is too long.
            let _ = socket.write_all(answer);
            String::from_utf8_lossy(&asked[..length]).into_owned()
        });
        (url, serving)
    }

    #[test]
    fn a_server_says_how_busy_it_is_while_it_answers() {
        let engine = EngineConfig { max_batch: 2, ..EngineConfig::default() };
        let config = Config { engine: Some(engine), tokens: 60, ..Config::default() };
        let server = Server::start(config).unwrap();
        let client = openai(format!("{}/v1", server.url()));
        block_on(async {
            let model = ready(client.as_ref()).await;
            client.connect(5).await;
            let opened = client.connections();
            let question = request(&model, "how busy are you?", 60);
            let asked = (0..5).map(|_| ask(client.as_ref(), &question, Live::now()));
            let looked = async {
                let mut seen = Vec::new();
                while seen.len() < 1000 {
                    let load = client.load().await.unwrap();
                    seen.push(load);
                    if (load.running, load.generation_tokens) == (Some(0.0), Some(300.0)) {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                seen
            };
            let (answers, seen) = tokio::join!(futures_util::future::join_all(asked), looked);
            assert!(answers.iter().all(|(_, e)| e.outcome.is_ok() && e.attempts == 1), "{answers:?}");
            assert!(seen.iter().any(|l| l.running == Some(2.0) && l.waiting == Some(3.0)), "{seen:?}");
            let given = |load: &Load| load.generation_tokens.unwrap();
            assert!(seen.is_sorted_by(|a, b| given(a) <= given(b)), "a counter counts up: {seen:?}");
            let last = seen.last().unwrap();
            let prompts: u64 = answers.iter().map(|(_, e)| e.usage.prompt.unwrap()).sum();
            assert_eq!((given(last), last.prompt_tokens), (300.0, Some(prompts as f64)));
            assert_eq!(client.connections(), opened, "looking is not counted");
            let opened = opened.unwrap() as usize;
            assert_eq!(server.connections(), opened + 1, "and has one connection for all looks");
            client.close().await.unwrap();
        });
        assert_eq!(server.log().len(), 5, "nor is it a request");
    }

    #[test]
    fn a_server_that_says_nothing_has_no_load_and_answers_all_the_same() {
        let server = Server::start(Config { metrics: false, ..Config::default() }).unwrap();
        let client = openai(server.url());
        block_on(async {
            let model = ready(client.as_ref()).await;
            assert_eq!(client.load().await, None);
            let (_, e) = ask(client.as_ref(), &request(&model, "hi", 4), Live::now()).await;
            assert!(e.outcome.is_ok(), "{:?}", e.outcome);
        });
        for (name, server, client) in all(LIMITS).into_iter().filter(|(name, ..)| *name != "openai") {
            assert_eq!(block_on(client.load()), None, "{name}");
            drop(server);
        }
    }

    #[test]
    fn only_a_scrape_that_is_understood_is_a_load() {
        let asked = |answer| {
            let (url, serving) = says(answer);
            let load = block_on(openai(url).load());
            (load, serving.join().unwrap())
        };
        let (load, request) =
            asked(b"HTTP/1.1 200 OK\r\ncontent-length: 32\r\n\r\nllamacpp:requests_processing 3\r\n");
        assert_eq!(load, Some(Load { running: Some(3.0), ..Load::default() }));
        assert!(request.starts_with("GET /metrics HTTP/1.1\r\n"), "beside the API: {request}");
        for wrong in [
            b"HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n<html></html>".as_slice(),
            b"HTTP/1.1 401 No\r\ncontent-length: 32\r\n\r\nllamacpp:requests_processing 3\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nllamacpp:requests_processing 3\r\n",
            b"not HTTP at all\r\n\r\n",
            b"",
        ] {
            assert_eq!(asked(wrong).0, None, "{}", String::from_utf8_lossy(wrong));
        }
        let huge =
            [b"HTTP/1.1 200 OK\r\n\r\nvllm:num_requests_running 1\n".as_slice(), &vec![b'\n'; 5 << 20]];
        assert_eq!(asked(huge.concat().leak()).0, None);
    }

    #[test]
    fn a_server_that_is_silent_is_not_waited_for() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let client = openai(format!("http://{}", listener.local_addr().unwrap()));
        let began = clock::now();
        assert_eq!(block_on(client.load()), None);
        assert!(clock::now().since(began).get() < 10.0);
    }

    #[test]
    fn what_a_server_says_about_its_times_is_kept() {
        let config = Config { ttft_ms: 20.0, itl_ms: 2.0, timings: true, ..Config::default() };
        let server = Server::start(config).unwrap();
        for name in ["openai", "ollama"] {
            let settings = Settings { url: Some(server.url()), limits: LIMITS, ..Settings::default() };
            let client = client::open(name, &settings).unwrap();
            let e = block_on(async {
                let model = ready(client.as_ref()).await;
                ask(client.as_ref(), &request(&model, "one two three", 6), Live::now()).await.1
            });
            let said = e.server.unwrap();
            let close = |seconds: Option<f64>, truth: f64| (seconds.unwrap() - truth).abs() < 1e-9;
            assert!(close(timings::prefill_seconds(&said), 0.02), "{name}: {said}");
            assert!(close(timings::decode_seconds(&said), 0.01), "{name}: {said}");
            let tokens = (timings::processed_tokens(&said), timings::cached_tokens(&said));
            let expected = if name == "openai" { (Some(3), Some(0)) } else { (None, None) };
            assert_eq!(tokens, expected, "{name}");
        }
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
