//! docs/schema.md and the code say the same, in both directions: every field has its row, every row its field.

use crate::sample::{NOW, calibration, events, info, record, run_of, summary, warnings};
use crate::table;
use arrow_schema::{DataType, Fields};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use wattle_core::event::Line;
use wattle_core::metrics::METRICS;
use wattle_core::summary::SCHEMA_VERSION;

const SCHEMA: &str = include_str!("../../../../docs/schema.md");

/// Field, and what is said of it: type, and for tables whether it can be null.
type Rows = BTreeMap<String, Vec<String>>;

/// The table below the heading `title`: its first cell without backticks, and the next `columns` cells.
fn documented(title: &str, columns: usize) -> Rows {
    let mut rows = Rows::new();
    let section = SCHEMA.lines().skip_while(|l| l.trim_start_matches('#') != format!(" {title}")).skip(1);
    for line in section.take_while(|l| !l.starts_with('#')).filter(|l| l.starts_with("| `")) {
        let cells: Vec<_> = line.split(" | ").map(|c| c.trim_matches(['|', ' '])).collect();
        let name = cells[0].trim_matches('`').to_owned();
        let said = cells[1..=columns].iter().map(|c| (*c).to_owned()).collect();
        assert!(rows.insert(name, said).is_none(), "{title}: {} stands there twice", cells[0]);
    }
    assert!(!rows.is_empty(), "docs/schema.md has no table below \"{title}\"");
    rows
}

fn assert_same(title: &str, documented: &Rows, found: &Rows) {
    let names = |rows: &Rows| rows.keys().cloned().collect::<BTreeSet<_>>();
    let (said, there) = (names(documented), names(found));
    assert_eq!(
        there.difference(&said).collect::<Vec<_>>(),
        [""; 0],
        "{title}: without a row in docs/schema.md"
    );
    assert_eq!(said.difference(&there).collect::<Vec<_>>(), [""; 0], "{title}: in docs/schema.md only");
    for (name, said) in documented {
        assert_eq!(said, &found[name], "{title}: {name}, in docs/schema.md and in the code");
    }
}

/// The leaves of a JSON value with their types. Objects whose keys are data are given with what to call such a key;
/// nothing is said of what lies inside the `opaque`.
fn leaves(path: &str, value: &Value, keyed: &[(&str, &str)], opaque: &[&str], out: &mut Rows) {
    let mut leaf = |kind: &str| {
        out.insert(path.to_owned(), vec![kind.to_owned()]);
    };
    match value {
        _ if opaque.contains(&path) => leaf("any"),
        Value::Null => panic!("{path}: the sample must know everything"),
        Value::Bool(_) => leaf("boolean"),
        Value::Number(n) if n.is_u64() => leaf("integer"),
        Value::Number(_) => leaf("number"),
        Value::String(_) => leaf("string"),
        Value::Array(items) => {
            assert!(!items.is_empty(), "{path}: the sample must have one");
            items.iter().for_each(|item| leaves(&format!("{path}[]"), item, keyed, opaque, out));
        }
        Value::Object(map) if map.is_empty() => leaf("object"),
        Value::Object(map) if map.keys().eq(["max", "mean", "median", "min"]) => leaf("level"),
        Value::Object(map) => {
            let dot = if path.is_empty() { "" } else { "." };
            let data = keyed.iter().find(|(p, _)| *p == path).map(|(_, key)| *key);
            for (key, value) in map {
                leaves(&format!("{path}{dot}{}", data.unwrap_or(key)), value, keyed, opaque, out);
            }
        }
    }
}

/// The leaves of a table's schema with their types and whether they can be null.
fn columns(path: &str, fields: &Fields, out: &mut Rows) {
    let model = info().model.unwrap().name;
    for field in fields {
        let name = if *field.name() == model { "<model>" } else { field.name() };
        let dot = if path.is_empty() { "" } else { "." };
        let path = format!("{path}{dot}{name}");
        match field.data_type() {
            DataType::Struct(fields) => columns(&path, fields, out),
            other => {
                let null = if field.is_nullable() { "null" } else { "never" };
                out.insert(path, vec![table::type_name(other), null.to_owned()]);
            }
        }
    }
}

/// A cell that says what null means is as good as "null".
fn documented_columns(title: &str) -> Rows {
    let mut rows = documented(title, 3);
    for said in rows.values_mut() {
        let null = if said.remove(2) == "never" { "never" } else { "null" };
        said[1] = null.to_owned();
    }
    rows
}

#[test]
fn every_column_of_the_tables_is_documented() {
    let (_parent, run) = run_of([record(0)]);
    run.finish().unwrap();
    for title in ["requests.parquet", "readings.parquet", "hf"] {
        let schema = match title {
            "hf" => table::stream(&run.path().join("hf/data-00000-of-00001.arrow")).0,
            name => table::parquet(&run.path().join(name)).0,
        };
        let mut found = Rows::new();
        columns("", schema.fields(), &mut found);
        assert_same(title, &documented_columns(title), &found);
    }
}

#[test]
fn every_key_of_run_json_is_documented() {
    let mut found = Rows::new();
    leaves("", &json!(info()), &[("sources[].facts", "<name>")], &[], &mut found);
    assert_same("run.json", &documented("run.json", 1), &found);
}

#[test]
fn every_key_of_summary_json_is_documented() {
    let keyed = [
        ("sessions", "<session>"),
        ("versions", "<name>"),
        ("metrics", "<metric>"),
        ("steady.metrics", "<metric>"),
        ("perimeters", "<perimeter>"),
        ("phases", "<name>"),
        ("gauges", "<name>"),
    ];
    let mut value = json!(summary());
    // The same spec as in run.json, documented there.
    assert_eq!(value.as_object_mut().unwrap().remove("config"), Some(json!(info().spec)));
    let mut found = Rows::from([("config".to_owned(), vec!["object".to_owned()])]);
    leaves("", &value, &keyed, &[], &mut found);
    assert_same("summary.json", &documented("summary.json", 1), &found);
}

#[test]
fn every_key_of_a_calibration_is_documented() {
    let keyed = [("quality.residuals", "<ladder>"), ("quality.seconds_residuals", "<ladder>")];
    let mut found = Rows::new();
    leaves("", &json!(calibration()), &keyed, &[], &mut found);
    assert_same("Calibration file", &documented("Calibration file", 1), &found);
}

#[test]
fn every_line_of_the_log_is_documented() {
    let opaque = ["record.item.metadata", "record.exchange.server", "event.data"];
    let mut found = Rows::new();
    for event in events() {
        let mut line = json!(Line::new(NOW, event));
        let line = line.as_object_mut().unwrap();
        assert!(line.remove("ts").is_some());
        let Some(Value::String(kind)) = line.remove("type") else { panic!("a line without a type") };
        leaves(&kind, &json!(line), &[], &opaque, &mut found);
    }
    assert_same("log.jsonl", &documented("log.jsonl", 1), &found);
}

#[test]
fn every_metric_is_documented_with_its_definition() {
    let found = METRICS.iter().map(|m| (m.name.to_owned(), vec![m.unit.to_owned(), m.definition.to_owned()]));
    assert_same("Metrics", &documented("Metrics", 2), &found.collect());
}

#[test]
fn every_warning_is_documented_with_its_fields() {
    let mut found = Rows::new();
    for warning in warnings() {
        let Value::Object(mut map) = json!(warning) else { panic!("a warning is an object") };
        let Some(Value::String(name)) = map.remove("warning") else { panic!("a warning has a name") };
        let fields: Vec<_> = map.keys().map(|k| format!("`{k}`")).collect();
        found.insert(name, vec![if fields.is_empty() { "-".into() } else { fields.join(", ") }]);
    }
    assert_same("Warnings", &documented("Warnings", 1), &found);
}

#[test]
fn the_version_of_the_schema_is_documented() {
    assert!(SCHEMA.contains(&format!("This is version **{SCHEMA_VERSION}**")));
}
