//! Errors as vendors say them, and bytes that nobody should send.

use crate::trap::Shape;

/// Status, content type and body of an error in a vendor's shape.
pub(crate) fn shaped(shape: Shape) -> (&'static str, &'static str, &'static str) {
    const JSON: &str = "application/json";
    match shape {
        Shape::OpenAi => (
            "400 Bad Request",
            JSON,
            r#"{"error":{"message":"the prompt is longer than the context","type":"invalid_request_error","param":"messages","code":"context_length_exceeded"}}"#,
        ),
        Shape::Vllm => (
            "400 Bad Request",
            JSON,
            r#"{"object":"error","message":"the prompt is longer than the context","type":"BadRequestError","param":null,"code":400}"#,
        ),
        Shape::LlamaCpp => (
            "400 Bad Request",
            JSON,
            r#"{"error":{"code":400,"message":"the prompt is longer than the context","type":"exceed_context_size_error"}}"#,
        ),
        Shape::Ollama => {
            ("404 Not Found", JSON, r#"{"error":"model \"tiny\" not found, try pulling it first"}"#)
        }
        Shape::FastApi => (
            "422 Unprocessable Entity",
            JSON,
            r#"{"detail":[{"type":"missing","loc":["body","messages"],"msg":"Field required","input":{}}]}"#,
        ),
        Shape::Tgi => (
            "422 Unprocessable Entity",
            JSON,
            r#"{"error":"Input validation error: the prompt is longer than the context","error_type":"validation"}"#,
        ),
        Shape::Text => ("500 Internal Server Error", "text/plain; charset=utf-8", "Internal Server Error"),
        Shape::Html => (
            "502 Bad Gateway",
            "text/html",
            "<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body>\r\n<center><h1>502 Bad Gateway</h1></center>\r\n</body>\r\n</html>\r\n",
        ),
    }
}

/// The body of a plain failure.
pub(crate) fn failure(openai: bool, message: &str) -> String {
    let message = super::quoted(message);
    if openai {
        format!(r#"{{"error":{{"message":{message},"type":"server_error","param":null,"code":null}}}}"#)
    } else {
        format!(r#"{{"error":{message}}}"#)
    }
}

/// What comes when an engine dies in the middle.
pub(super) fn in_stream(openai: bool) -> &'static [u8] {
    if openai {
        br#"{"error":{"message":"the engine died","type":"InternalServerError","param":null,"code":500}}"#
    } else {
        br#"{"error":"the engine died"}"#
    }
}

/// Broken JSON, no JSON, no UTF-8, a NUL, a field nobody knows.
pub(crate) fn garbage_lines() -> &'static [u8] {
    b"data: {\"choices\": [{\"delta\"\n\ndata: not json\n\n\xff\xfe\x80\n\ndata: \xc3\x28\0\n\nnonsense: 1\n\n"
}

/// No HTTP.
pub(crate) fn garbage_head() -> &'static [u8] {
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 garbage \xff\xfe\r\n\r\n"
}
