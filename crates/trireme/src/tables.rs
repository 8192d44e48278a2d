//! The tables of the start-up log, drawn as Triton draws them.

use comfy_table::{Table, TableComponent};
use trireme_core::{LoadRow, Server, ServerOptions};

fn table<const N: usize>(head: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::ASCII_FULL_CONDENSED);
    table
        .set_style(TableComponent::HeaderLines, '-')
        .set_style(TableComponent::MiddleHeaderIntersections, '+');
    table.set_header(head);
    for row in rows {
        table.add_row(row);
    }
    table.to_string()
}

/// `Backend | Path | Config`
pub(crate) fn backends(server: &Server) -> String {
    table(
        ["Backend", "Path", "Config"],
        server.backend_rows().into_iter().map(|(name, path, config)| [name, path, config]),
    )
}

/// `Model | Version | Status`
pub(crate) fn models(rows: &[LoadRow]) -> String {
    let version = |row: &LoadRow| row.version.map_or_else(|| "-".to_owned(), |version| version.to_string());
    table(
        ["Model", "Version", "Status"],
        rows.iter().map(|row| [row.model.clone(), version(row), row.status.clone()]),
    )
}

/// `Option | Value`
pub(crate) fn options(server: &Server, options: &ServerOptions, exit_timeout_secs: u64) -> String {
    let metadata = server.metadata();
    let flag = |on: bool| if on { "1" } else { "0" }.to_owned();
    let mut rows = vec![
        ["server_id".to_owned(), metadata.name.clone()],
        ["server_version".to_owned(), metadata.version.clone()],
        ["server_extensions".to_owned(), metadata.extensions.join(" ")],
    ];
    for (i, path) in options.repositories.iter().enumerate() {
        rows.push([format!("model_repository_path[{i}]"), path.display().to_string()]);
    }
    rows.push(["model_control_mode".to_owned(), options.control_mode.as_str().to_owned()]);
    for (i, name) in options.load_models.iter().enumerate() {
        rows.push([format!("startup_models_{i}"), name.clone()]);
    }
    rows.push(["strict_model_config".to_owned(), flag(options.strict_config)]);
    rows.push(["model_config_name".to_owned(), options.model_config_name.clone().unwrap_or_default()]);
    rows.push(["strict_readiness".to_owned(), flag(options.strict_readiness)]);
    rows.push(["exit_timeout".to_owned(), exit_timeout_secs.to_string()]);
    rows.push(["cache_enabled".to_owned(), flag(options.cache.is_some())]);
    table(["Option", "Value"], rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_the_model_table_as_triton_does() {
        let rows = [
            LoadRow {
                model: "m".into(),
                version: Some(1),
                status: "READY".into(),
                advice: None,
                failed: false,
            },
            LoadRow {
                model: "empty".into(),
                version: None,
                status: "Not loaded: x".into(),
                advice: None,
                failed: false,
            },
        ];
        let drawn = "\
+-------+---------+---------------+
| Model | Version | Status        |
+-------+---------+---------------+
| m     | 1       | READY         |
| empty | -       | Not loaded: x |
+-------+---------+---------------+";
        assert_eq!(models(&rows), drawn);
    }
}
