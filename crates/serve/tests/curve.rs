//! The page and the picture of a sweep, from nothing but its `sweep.json`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on stops")]

use serde_json::{Value, json};
use std::path::Path;
use wattle_serve::curve;
use wattle_serve::report::ReportError;

fn point(value: Value, run: &str, joules: f64, kept_up: bool) -> Value {
    let metric = |value: f64| json!({"value": value, "low": value * 0.9, "high": value * 1.1, "unit": "", "n": 100, "method": "counter"});
    let mut ttft = metric(joules / 10.0);
    ttft["p50"] = json!(joules / 11.0);
    ttft["p99"] = json!(joules / 5.0);
    json!({"value": value, "run": run, "kept_up": kept_up, "metrics": {
        "joules_per_output_token": metric(joules), "output_tokens_per_s": metric(100.0 / joules), "ttft_s": ttft}})
}

/// The page and the picture of a sweep with these points.
fn drawn(folder: &Path, key: &str, points: &[Value]) -> (String, String) {
    let swept = json!({"key": key, "points": points, "output_dir": folder});
    std::fs::write(folder.join("sweep.json"), swept.to_string()).unwrap();
    assert!(curve::is_sweep(folder));
    let page = curve::write(folder, None).unwrap();
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    (read(&page), read(&folder.join("curve.svg")))
}

/// The texts of all elements of that name; fails unless it is XML.
fn texts(xml: &str, element: &str) -> Vec<String> {
    let xml = xml.replacen("<!doctype html>\n", "", 1);
    let tree = roxmltree::Document::parse(&xml).unwrap_or_else(|e| panic!("{e}: {xml}"));
    let all = tree.descendants().filter(|n| n.has_tag_name(element) || n.tag_name().name() == element);
    all.map(|n| n.text().unwrap_or("").trim().to_owned()).collect()
}

#[test]
fn each_point_is_drawn_with_its_interval() {
    let folder = tempfile::tempdir().unwrap();
    let points: Vec<Value> = [(1, 2.0), (4, 0.6), (16, 0.2), (64, 0.04)]
        .iter()
        .map(|(n, j)| point(json!(n), &format!("concurrency-{n}"), *j, *n < 64))
        .collect();
    std::fs::create_dir(folder.path().join("concurrency-4")).unwrap();
    std::fs::write(folder.path().join("concurrency-4/report.html"), "").unwrap();
    let (page, svg) = drawn(folder.path(), "concurrency", &points);
    let labels = texts(&svg, "text");
    for label in
        ["1", "4", "16", "64", "concurrency (log₂)", "Energy per output token, logarithmic", "median", "p99"]
    {
        assert!(labels.iter().any(|l| l == label), "{label}: {labels:?}");
    }
    assert!(labels.iter().any(|l| l.contains("did not keep up")), "{labels:?}");
    let tree = roxmltree::Document::parse(&svg).unwrap();
    assert_eq!(tree.root_element().attribute("role"), Some("img"));
    assert_eq!(texts(&svg, "title"), ["By concurrency"]);
    // Three panels with a circle for each point, and triangles for the tail.
    assert_eq!(tree.descendants().filter(|n| n.tag_name().name() == "circle").count(), 3 * 4);
    assert_eq!(tree.descendants().filter(|n| n.tag_name().name() == "polygon").count(), 4);
    assert!(svg.contains("prefers-color-scheme: dark"));
    assert!(page.contains("<a href=\"./concurrency-4/report.html\">4</a>"), "{page}");
    assert!(!page.contains("concurrency-16/report.html"), "there is none to link to");
    let cells = texts(&page, "td");
    assert!(cells.iter().any(|c| c == "600 mJ") && cells.iter().any(|c| c == "× no"), "{cells:?}");
    assert!(page.contains("540 mJ to 660 mJ"), "{page}");
    assert!(!page.contains("<script") && !page.contains("http://1") && !page.contains("https://"));
}

#[test]
fn every_colour_of_the_picture_has_a_dark_twin() {
    let folder = tempfile::tempdir().unwrap();
    let (_, svg) =
        drawn(folder.path(), "rate", &[point(json!(1), "a", 1.0, true), point(json!(2), "b", 2.0, false)]);
    let (_, dark) = svg.split_once("prefers-color-scheme: dark").unwrap();
    let (dark, drawn) = dark.split_once("</style>").unwrap();
    for attribute in ["fill=\"#", "stroke=\"#"] {
        for (i, _) in drawn.match_indices(attribute) {
            let whole = &drawn[i..i + attribute.len() + 7];
            assert!(dark.contains(whole), "{whole}");
        }
    }
}

#[test]
fn hostile_names_are_text_and_lead_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let name = "</text></title><script>alert('1')</script>&\"\u{1b}\u{0}\u{ffff}";
    let points = [
        point(json!(name), "javascript:alert(1)", 1.0, true),
        point(json!("b"), "../../etc", 2.0, false),
        point(json!({"c": "<b>"}), "a\" onclick=\"x", 3.0, true),
    ];
    for run in ["javascript:alert(1)", "a\" onclick=\"x"] {
        std::fs::create_dir(folder.path().join(run)).unwrap();
        std::fs::write(folder.path().join(run).join("report.html"), "").unwrap();
    }
    let (page, svg) = drawn(folder.path(), "<model>\u{1}", &points);
    for xml in [&page, &svg] {
        assert!(texts(xml, "script").is_empty() && texts(xml, "b").is_empty());
    }
    let flat = page.replacen("<!doctype html>\n", "", 1);
    let tree = roxmltree::Document::parse(&flat).unwrap();
    let links: Vec<&str> = tree.descendants().filter_map(|n| n.attribute("href")).collect();
    assert_eq!(links, ["./javascript%3Aalert%281%29/report.html", "./a%22%20onclick%3D%22x/report.html"]);
    assert!(tree.descendants().all(|n| n.attribute("onclick").is_none()));
}

#[test]
fn figures_that_are_unknown_leave_a_gap() {
    let folder = tempfile::tempdir().unwrap();
    let mut lost = point(json!(2), "b", 1.0, false);
    lost["metrics"] = json!({});
    let (page, svg) = drawn(folder.path(), "rate", &[point(json!(1), "a", 1.0, true), lost.clone()]);
    assert!(page.contains("unknown"));
    let circles = roxmltree::Document::parse(&svg)
        .unwrap()
        .descendants()
        .filter(|n| n.tag_name().name() == "circle")
        .count();
    assert_eq!(circles, 3);
    // Nothing at all is no picture, but a page.
    std::fs::remove_file(folder.path().join("curve.svg")).unwrap();
    let swept = json!({"key": "rate", "points": [lost], "output_dir": "."});
    std::fs::write(folder.path().join("sweep.json"), swept.to_string()).unwrap();
    curve::write(folder.path(), None).unwrap();
    assert!(!folder.path().join("curve.svg").exists());
    let swept = json!({"key": "rate", "points": [], "output_dir": "."});
    std::fs::write(folder.path().join("sweep.json"), swept.to_string()).unwrap();
    assert!(matches!(curve::write(folder.path(), None), Err(ReportError::Empty(_))));
}
