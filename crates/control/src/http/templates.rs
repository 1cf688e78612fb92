//! Routes about templates and teams.

use axum::Json;
use axum::extract::{Path, State};
use proto::api::{ErrorBody, Team, Template, TemplateAlias};
use proto::guest::ENVD_VERSION;
use proto::node::TemplateView;

use super::extract::Params;
use crate::app::{Caller, Control};
use crate::error::ApiError;

/// Only the caller's own team can be named.
#[derive(Debug, serde::Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct OfTeam {
    #[serde(rename = "teamID")]
    team_id: Option<String>,
}

/// The templates that sandboxes can be made from.
#[utoipa::path(get, path = "/templates", tag = "templates", params(("teamID" = Option<String>, Query)),
    responses((status = 200, body = [Template]), (status = "default", body = ErrorBody)))]
pub(crate) async fn list(
    State(control): State<Control>,
    caller: Caller,
    Params(of): Params<OfTeam>,
) -> Result<Json<Vec<Template>>, ApiError> {
    if of.team_id.is_some_and(|team| team != caller.team.as_str()) {
        return Ok(Json(Vec::new()));
    }
    Ok(Json(control.templates().await?.into_iter().map(template).collect()))
}

fn template(view: TemplateView) -> Template {
    let manifest = view.manifest;
    Template {
        template_id: manifest.template_id.to_string(),
        build_id: manifest.build_id.to_string(),
        cpu_count: manifest.machine.vcpus,
        memory_mb: manifest.machine.memory_mib,
        disk_size_mb: manifest.machine.disk_mib,
        public: true,
        names: manifest.aliases.clone(),
        aliases: manifest.aliases,
        created_at: manifest.created_at,
        updated_at: manifest.created_at,
        envd_version: ENVD_VERSION.to_owned(),
        build_status: "ready".to_owned(),
        bytes: view.bytes,
    }
}

/// The template that has a name.
#[utoipa::path(get, path = "/templates/aliases/{alias}", tag = "templates", params(("alias" = String, Path)),
    responses((status = 200, body = TemplateAlias), (status = "default", body = ErrorBody)))]
pub(crate) async fn alias(
    State(control): State<Control>,
    _caller: Caller,
    Path(alias): Path<String>,
) -> Result<Json<TemplateAlias>, ApiError> {
    let template = control.template(&alias).await?;
    Ok(Json(TemplateAlias { template_id: template.manifest.template_id.to_string(), public: true }))
}

/// The key's own team.
#[utoipa::path(get, path = "/teams", tag = "teams",
    responses((status = 200, body = [Team]), (status = "default", body = ErrorBody)))]
pub(crate) async fn teams(caller: Caller) -> Json<Vec<Team>> {
    let team = caller.team.to_string();
    Json(vec![Team { team_id: team, name: caller.name, api_key: String::new(), is_default: true }])
}
