//! The OpenAPI document, generated from the handlers. `docs/openapi.json` is its golden copy.

use axum::Json;
use utoipa::OpenApi;
use utoipa::openapi::security::{ApiKey, ApiKeyValue, SecurityScheme};

/// The public API.
#[derive(OpenApi)]
#[openapi(
    info(title = "Pando", description = "The public API of Pando: E2B's names and shapes."),
    paths(
        super::sandboxes::create_v2,
        super::sandboxes::create_v1,
        super::sandboxes::list,
        super::sandboxes::list_v1,
        super::sandboxes::get,
        super::sandboxes::kill,
        super::sandboxes::connect_v2,
        super::sandboxes::connect_v1,
        super::sandboxes::set_timeout,
        super::sandboxes::refresh,
        super::sandboxes::metrics,
        super::sandboxes::metrics_of_many,
        super::sandboxes::logs,
        super::sandboxes::logs_v2,
        super::templates::list,
        super::templates::alias,
        super::templates::teams,
        super::health,
    ),
    modifiers(&Key),
    security(("ApiKey" = []))
)]
struct Api;

struct Key;

impl utoipa::Modify for Key {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-API-Key")));
        document.components.get_or_insert_default().add_security_scheme("ApiKey", scheme);
    }
}

/// The document as it is served.
pub fn generate() -> utoipa::openapi::OpenApi {
    Api::openapi()
}

pub(super) async fn document() -> Json<utoipa::openapi::OpenApi> {
    Json(generate())
}

#[cfg(test)]
mod tests {
    /// `PANDO_BLESS=1 cargo nextest run -p control golden` writes it anew.
    #[test]
    fn golden_document_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
        let text = super::generate().to_pretty_json().unwrap() + "\n";
        if std::env::var_os("PANDO_BLESS").is_some() {
            std::fs::write(path, &text).unwrap();
        }
        let golden = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            golden == text,
            "docs/openapi.json is stale; run PANDO_BLESS=1 cargo nextest run -p control golden"
        );
    }
}
