//! Errors: each with key, value, origin and what is expected.

use super::*;
use std::os::fd::AsRawFd;

#[test]
fn an_invalid_value_is_named_with_key_origin_and_hint() {
    let cases: [(&str, &[&str]); 34] = [
        ("tracing.endpoint=collector:4318", &["tracing.endpoint", "OTLP over HTTP"]),
        ("tracing.endpoint=http://collector:99999", &["tracing.endpoint", "65535", "OTLP over HTTP"]),
        ("tracing.endpoint=http://ann:pass@collector", &["http://***@collector", "tracing.headers_file"]),
        ("tiers.g4=s3://kv/a", &["tiers.g4.url = \"s3://kv/a\"", "3 to 63"]),
        ("tiers.g4.endpoint=minio", &["tiers.g4.endpoint = \"minio\"", "https://"]),
        ("tiers.g2=4Gb of it", &["tiers.g2 = \"4Gb of it\"", "(--set tiers.g2=4Gb of it)", "4GiB", "off"]),
        ("router.policy=robin", &["router.policy = \"robin\"", "`round-robin`", "`kv`"]),
        ("frontend.max_body=many", &["frontend.max_body = \"many\"", "expected a size with its unit"]),
        ("workers=prefill:0", &["workers", "there would be no worker"]),
        ("listen=localhost", &["listen", "127.0.0.1:8000"]),
        ("shutdown_timeout=30", &["shutdown_timeout = 30", "with its unit", "\"30s\""]),
        ("router.index_memory=4294967296", &["router.index_memory = 4294967296", "\"4GiB\""]),
        ("tiers.g2=65536", &["tiers.g2 = 65536", "\"64KiB\"", "auto"]),
        ("tiers=4", &["tiers = 4", "expected a table, like {KEY = VALUE}"]),
        ("log=info", &["log = \"info\"", "expected a table, like {KEY = VALUE}"]),
        ("tiers.g3_5=/mnt/flash", &["tiers.g3_5 = \"/mnt/flash\"", "expected a table, like {KEY = VALUE}"]),
        ("router.models=small", &["router.models = \"small\"", "expected a table, like {KEY = VALUE}"]),
        ("nats.servers=nats://a:4222", &["expected an array, like [\"nats://a:4222\"]"]),
        ("frontend.cors_origins=*", &["frontend.cors_origins = \"*\"", "expected an array, like [\"*\"]"]),
        ("tiers.g3_paths=/mnt/a", &["expected an array, like [{path = \"/mnt/a/kv\", capacity = \"400GiB\"}]"]),
        ("data_dir=5", &["data_dir = 5", "expected a path"]),
        ("upstreams=[{url=\"http://a\",block_size=0}]", &["upstreams.0.block_size = 0", "a whole number, 1 or more"]),
        ("tiers.compression=true", &["tiers.compression = true", "expected one of `off`, `auto`, `always`"]),
        ("router.planner.mode=false", &["router.planner.mode = false", "expected one of `off`, `recommend`, `apply`"]),
        ("tiers.encryption.keys=5", &["tiers.encryption.keys = 5", "docs/configuration.md"]),
        ("engine.max_prefill_chunk_tokens=0", &["engine.max_prefill_chunk_tokens = 0", "between 1 and"]),
        ("threads=0", &["threads = 0", "auto"]),
        ("frontend.max_body=0", &["frontend.max_body = 0", "expected a size between 1B and 1GiB"]),
        ("frontend.idle_timeout=0", &["frontend.idle_timeout = 0", "expected a duration between"]),
        ("frontend.max_headers=4KiB", &["frontend.max_headers = \"4KiB\"", "expected a size between 8KiB and 16MiB"]),
        (
            "router.policy={score=[{term=queue},{term=speed}]}",
            &["router.policy.score.1.term = \"speed\" (--set router.policy={score", "`overlap`"],
        ),
        (
            "router.decode_interference_weight=-1",
            &[
                "router.decode_interference_weight = -1 (--set router.decode_interference_weight=-1)",
                "a number between 0 and 1000000",
            ],
        ),
        ("router.slo.ttft=0", &["router.slo.ttft = 0 (--set router.slo.ttft=0)"]),
        (
            "router.models.small.decode_interference_weight=-1",
            &["router.models.small.decode_interference_weight = -1 (--set router.models"],
        ),
    ];
    for (assignment, parts) in cases {
        let error = error_of(&Sources { environment: environment(&[]), flags: vec![set(assignment)], file: None });
        for part in parts {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
    }
}

#[test]
fn values_that_cannot_work_together_are_refused() {
    let cases = [
        ("engine.max_num_seqs=many", "expected a whole number, 0 or more"),
        ("router.decode_interference_weight=much", "expected a number"),
        ("frontend.parse_special_tokens=3", "expected `true` or `false`"),
        ("frontend.max_inflight_bodies=1MiB", "no body of frontend.max_body fits; expected at least \"16MiB\""),
        ("frontend.allowed_hosts=[\"https://kv.example.com\"]", "without scheme, port and path"),
        ("frontend.allowed_hosts=[\"kv.example.com:8000\"]", "without scheme, port and path"),
        ("frontend.relay_paths=[\"infill\"]", "expected a path like \"/infill\""),
        ("frontend.relay_paths=[\"/metrics\"]", "because the gateway answers /metrics itself"),
        ("nats.servers=[\"\"]", "expected nats://HOST:PORT"),
        ("nats.servers=[\"nats://\"]", "expected nats://HOST:PORT"),
        ("cluster.advertise=http://0.0.0.0:8100", "all addresses of a machine"),
        ("cluster.advertise=http://[::]:8100", "all addresses of a machine"),
    ];
    for (assignment, wanted) in cases {
        let error = error_of(&Sources { environment: environment(&[]), flags: vec![set(assignment)], file: None });
        assert!(error.contains(wanted), "`{wanted}` is not in: {error}");
    }
}

#[test]
fn an_unknown_key_is_named_with_origin_and_suggestion() {
    let from_env = Sources { environment: environment(&[("BLOCKYARD_ROUTER__POLCY", "kv")]), ..Sources::default() };
    let error = error_of(&from_env);
    assert!(error.contains("`router.polcy` (environment BLOCKYARD_ROUTER__POLCY)"), "{error}");
    assert!(error.contains("did you mean `router.policy`?"), "{error}");
    let one = Sources { environment: environment(&[("BLOCKYARD_ROUTER_POLICY", "kv")]), ..Sources::default() };
    let error = error_of(&one);
    assert!(error.contains("; write two underscores for a dot: BLOCKYARD_ROUTER__POLICY"), "{error}");
    for (assignment, meant) in [("policy=kv", Some("router.policy")), ("modl=x", Some("model")), ("colour=red", None)] {
        let error = error_of(&Sources { environment: environment(&[]), flags: vec![set(assignment)], file: None });
        assert_eq!(error.contains("did you mean"), meant.is_some(), "{error}");
        assert!(meant.is_none_or(|meant| error.contains(&format!("`{meant}`"))), "{error}");
    }
}

#[test]
fn a_key_with_an_empty_part_is_unknown() {
    for assignment in [".listen=1", "frontend..api_keys_file=a", "tiers.g2.=1GiB", ".=1", "..tiers={}"] {
        let error = error_of(&Sources { environment: environment(&[]), flags: vec![set(assignment)], file: None });
        assert!(error.contains("unknown key"), "{assignment}: {error}");
    }
    let variables = [("BLOCKYARD___FRONTEND__API_KEYS_FILE", "a"), ("BLOCKYARD_FRONTEND____API_KEYS_FILE", "a")];
    for variable in variables {
        let error = error_of(&Sources { environment: environment(&[variable]), ..Sources::default() });
        assert!(error.contains(&format!("(environment {})", variable.0)), "{error}");
        assert!(error.contains("did you mean `frontend.api_keys_file`?"), "{error}");
    }
}

#[test]
fn a_variable_that_is_no_text_is_refused() {
    for variable in [("BLOCKYARD_FRONTEND__API_KEYS_FILE", "keys\u{fffd}"), ("BLOCKYARD_LISTE\u{fffd}", "8000")] {
        let error = error_of(&Sources { environment: environment(&[variable]), ..Sources::default() });
        assert!(error.contains(&format!("environment {}: name and value must be UTF-8", variable.0)), "{error}");
    }
    let others = [("OTHER", "\u{fffd}"), ("BLOCKYARD_SERVICE_HOST", "\u{fffd}")];
    assert!(load(&Sources { environment: environment(&others), ..Sources::default() }).is_ok());
}

#[test]
fn all_errors_are_reported_with_their_lines() {
    let text = "\
port = 9000
model = 'tiny'

[tier]
g1 = '1GiB'

[tiers]
g2 = 'lots'
quotas = [{ tenant = 'a', g1_limit = 'much' }, { tenant = 'b', g5_limit = '1GiB' }]

[router]
policy = 'robin'
decode_interference_weight = nan
planer = { mode = 'off' }

[router.admission.tenants.blue]
wieght = 2
max_inflight_tokens = 0

[router.models.\"gpt-4.1\"]
decode_interference_weight = -1
";
    let errors = refused_to_serve(text);
    let wanted = [
        "unknown key `port` (FILE:1); did you mean `listen`?",
        "unknown key `tier` (FILE:4); did you mean `tiers`?",
        "tiers.g2 = \"lots\" (FILE:8): expected a size",
        "tiers.quotas.0.g1_limit = \"much\" (FILE:9): expected a size",
        "unknown key `tiers.quotas.1.g5_limit` (FILE:9); did you mean `tiers.quotas.1.g",
        "router.policy = \"robin\" (FILE:12): expected one of",
        "router.decode_interference_weight = nan (FILE:13): expected a number",
        "unknown key `router.planer` (FILE:14); did you mean `router.planner`?",
        "unknown key `router.admission.tenants.blue.wieght` (FILE:17); \
         did you mean `router.admission.tenants.blue.weight`?",
        "router.admission.tenants.blue.max_inflight_tokens = 0 (FILE:18): expected at least 1",
        "router.models.gpt-4.1.decode_interference_weight = -1 (FILE:21): expected a number",
        "no such model is served; the served model is `tiny`",
        "frontend.tenant_header",
    ];
    for wanted in wanted {
        assert!(errors.contains(wanted), "`{wanted}` is not in:\n{errors}");
    }
    assert!(errors.starts_with("the configuration has 13 errors:\n"), "{errors}");
}

#[test]
fn all_syntax_errors_are_reported_with_their_lines() {
    let errors = refused_to_serve("model = \n[tiers]\ng1 = '1GiB'\ng1 = '2GiB'\nlisten 8000\n");
    for line in ["FILE, line 1", "FILE, line 4", "FILE, line 5"] {
        assert!(errors.contains(line), "{line} is not in:\n{errors}");
    }
}

#[test]
fn a_list_entry_without_a_field_is_reported_once() {
    let errors = refused_to_serve("[tiers]\ng3_5 = { path = '/mnt', max_age = '5 apples' }\n");
    let lines: Vec<&str> = errors.lines().collect();
    assert!(errors.contains("tiers.g3_5.max_age") && errors.contains("`capacity` is required"), "{errors}");
    assert_eq!(lines.len(), 3, "{errors}");
}

#[test]
fn serve_refuses_values_that_contradict_each_other() {
    for (text, wanted) in [
        ("[router.models.small2]\npolicy = 'session'", "router.models.small2"),
        ("[router.admission.tenants.blue]\nweight = 2", "frontend.tenant_header"),
        ("[tiers]\ng1 = 'off'", "tiers.g1"),
        ("workers = 'prefill:1'", "no worker would decode"),
        ("listen = 9000\n[admin]\nlisten = '127.0.0.1:9000'", "admin.listen"),
        ("[log]\nfilter = 'a=b=c'", "log.filter"),
        ("[log]\nfilter = 'info,kvbm=debg'", "log.filter = \"info,kvbm=debg\""),
        ("[log]\nfilter = 'info,debg'", "\"debg\" is no level; expected off, error, warn, info"),
        ("[log]\nfilter = 'info,kvmb=debug'", "\"kvmb\" is no part; did you mean kvbm?"),
        ("[log]\nfilter = 'info,KVBM=debug'", "\"KVBM\" is no part; did you mean kvbm?"),
        ("[log]\nfilter = 'info,Async_Nats::connector=debug'", "\"Async_Nats\" is no part; did you mean async_nats?"),
        ("[log]\nfilter = 'kv=debug'", "\"kv\" is no part; did you mean kvbm?"),
        ("[log]\nfilter = 'db=debug'", "\"db\" is no part; expected one of frontend, router"),
        ("[log]\nfilter = 'foo::bar=debug'", "\"foo\" is no part; expected one of frontend, router"),
        ("upstreams = ['http://a']\n[router.planner]\nmode = 'apply'", "router.planner.mode"),
    ] {
        let errors = refused_to_serve(text);
        assert!(errors.contains(wanted), "{text}: {errors}");
    }
    let served = file("model = 'models/llama-3.1'\n[router.models.\"llama-3.1\"]\npolicy = 'session'\n");
    let sources = Sources { file: Some(served.path().into()), environment: environment(&[]), flags: vec![] };
    assert!(Config::load_to_serve(&sources).is_ok(), "the folder's name is the model's");
}

#[test]
fn a_log_filter_may_name_parts_modules_and_libraries() {
    for filter in ["", "info", "off,kvbm=debug", "info,kvbm::disk=trace,router=warn", "info,async_nats=warn"] {
        assert_eq!(check_log_filter(filter), Ok(()), "{filter}");
    }
}

#[test]
fn the_admin_api_of_a_worker_has_a_port_of_its_own() {
    let loaded = |admin: &str| {
        let written = file(&format!("cluster.listen = '127.0.0.1:8100'\nadmin.listen = '{admin}'\n"));
        let sources = Sources { file: Some(written.path().into()), environment: environment(&[]), flags: vec![] };
        Config::load_for(&sources, Purpose::Worker).map(|(config, _)| config.admin.listen.map(|at| at.port))
    };
    assert_eq!(loaded("127.0.0.1:9100").unwrap(), Some(9100));
    let refused = loaded("127.0.0.1:8100").unwrap_err().to_string();
    assert!(refused.contains("admin.listen") && refused.contains("expected another port"), "{refused}");
}

#[test]
fn a_folder_and_a_file_that_is_too_large_are_not_read() {
    let (large, folder) = (file(""), tempfile::tempdir().unwrap());
    large.as_file().set_len(crate::config::file::MAX_FILE_BYTES + 1).unwrap();
    for (path, wanted) in [(folder.path(), "directory"), (large.path(), "expected at most")] {
        let sources = Sources { environment: environment(&[]), flags: vec![], file: Some(path.to_owned()) };
        assert!(error_of(&sources).contains(wanted), "{}", error_of(&sources));
        let again = Config::load_again_for(&sources, Purpose::Tools).err().expect("it is not read").to_string();
        assert!(again.contains("expected a regular file of at most"), "{again}");
    }
}

#[test]
fn a_pipe_is_read_at_the_start_and_not_again() {
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(b"shutdown_timeout = '7s'\n").unwrap();
    drop(writer);
    // As the shell names the pipe of `--config <(…)`.
    let path = format!("/dev/fd/{}", reader.as_raw_fd());
    let sources = Sources { environment: environment(&[]), flags: vec![], file: Some(path.into()) };
    let (config, _) = Config::load(&sources).unwrap();
    assert_eq!(config.shutdown_timeout, Some(HumanDuration::secs(7)));
    let again = Config::load_again_for(&sources, Purpose::Tools).err().expect("it is not read").to_string();
    assert!(again.contains("expected a regular file of at most"), "{again}");
}
