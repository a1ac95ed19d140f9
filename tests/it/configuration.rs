//! What `docs/configuration.md` says about the configuration is what the program does.

use blockyard::config::{Config, defaults};
use std::collections::BTreeMap;

const PAGE: &str = include_str!("../../docs/configuration.md");

#[test]
fn trap_14_every_key_is_documented_with_its_default_and_nothing_else_is() {
    let documented: BTreeMap<String, String> = PAGE.lines().filter_map(row).collect();
    // The data folder depends on the user; the page says how.
    let said = |key: &str, value: &Option<String>| match (key, value) {
        ("data_dir", _) => "blockyard in the user's cache folder".into(),
        (_, Some(value)) => value.clone(),
        (_, None) => "unset".into(),
    };
    let real: BTreeMap<String, String> =
        defaults().into_iter().map(|(key, value)| (key.clone(), said(&key, &value))).collect();
    assert_eq!(documented, real);
}

#[test]
fn trap_14_the_help_names_the_defaults_that_hold() {
    use clap::CommandFactory;
    let mut command = blockyard::cli::Cli::command();
    let help = command.find_subcommand_mut("serve").expect("there is a serve").render_long_help().to_string();
    let Config { model, listen, workers, log, .. } = Config::with_cache("".as_ref());
    for default in [model.to_string(), listen.to_string(), workers.to_string(), log.filter] {
        assert!(help.contains(&format!("[default: {default}]")), "[default: {default}] is not in:\n{help}");
    }
}

#[test]
fn presets_and_policies_on_the_page_about_routing_are_those_of_the_program() {
    let page = include_str!("../../docs/routing.md");
    for preset in router::Preset::ALL {
        let router::Settings { decode_weight, cache_bias, .. } = preset.settings();
        let row = format!("| `{}` | `{decode_weight:?}` | `{cache_bias:?}` |", preset.name());
        assert!(page.contains(&row), "{row}");
    }
    let known = router::Policy::ALL;
    assert!(known.iter().all(|policy| page.contains(&format!("`{}`", policy.name()))));
}

/// The key and the default of a row of a table.
fn row(line: &str) -> Option<(String, String)> {
    let mut cells = line.strip_prefix("| `")?.split('|').map(|cell| cell.trim().replace('`', ""));
    Some((cells.next()?, cells.next()?))
}
