use super::*;
use std::io::Write;

fn set(assignment: &str) -> Flag {
    assignment.parse().unwrap()
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::Builder::new().prefix("blockyard").suffix(".toml").tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

fn environment(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    let home = [("HOME", "/home/ada")];
    home.iter().chain(pairs).map(|(name, value)| ((*name).into(), (*value).into())).collect()
}

fn load(sources: &Sources) -> Result<(Config, Origins), String> {
    Config::load(sources).map_err(|error| error.to_string())
}

fn error_of(sources: &Sources) -> String {
    load(sources).err().expect("the configuration is wrong")
}

#[test]
fn no_source_gives_the_defaults() {
    let (config, origins) = load(&Sources { environment: environment(&[]), ..Sources::default() }).unwrap();
    assert_eq!(config, Config::with_cache("/home/ada/.cache".as_ref()));
    assert_eq!(origins.of("listen"), "default");
}

#[test]
fn only_this_machine_can_connect_by_default() {
    let listens = |flags: Vec<Flag>| {
        let (config, _) = load(&Sources { environment: environment(&[]), flags, ..Sources::default() }).unwrap();
        (config.listen, config.admin.listen)
    };
    let here = |listen: &Listen| listen.host.parse::<std::net::IpAddr>().is_ok_and(|host| host.is_loopback());
    let (api, admin) = listens(vec![]);
    assert!(here(&api), "{api}");
    assert_eq!(admin, None, "it asks for no key, so it is off");
    let (api, admin) = listens(vec![set("listen=9000"), set("admin.listen=9001")]);
    for (listen, port) in [(api, 9000), (admin.unwrap(), 9001)] {
        assert!(here(&listen) && listen.port == port, "a port alone stays on this machine: {listen}");
    }
}

#[test]
fn precedence_is_defaults_file_environment_flags() {
    let file = file("listen = '0.0.0.0:1'\nworkers = 'both:1'\n[tiers]\ng2 = '1GiB'\ng3 = 'off'\n");
    let sources = Sources {
        file: Some(file.path().into()),
        environment: environment(&[("BLOCKYARD_LISTEN", "0.0.0.0:2"), ("BLOCKYARD_TIERS__G2", "2GiB")]),
        flags: vec![Flag::own("--listen", "listen", "0.0.0.0:3"), set("router.policy=round-robin")],
    };
    let (config, origins) = load(&sources).unwrap();
    assert_eq!(config.listen.port, 3);
    let tiers = Tiers { g2: Budget::Bytes(ByteSize(2 << 30)), g3: Budget::Off, ..Tiers::default() };
    assert_eq!(config.tiers, tiers);
    assert_eq!(config.workers.to_string(), "both:1");
    let origin = |key| origins.of(key);
    assert_eq!(origin("listen"), "--listen");
    assert_eq!(origin("tiers.g2"), "environment BLOCKYARD_TIERS__G2");
    assert_eq!(origin("tiers.g3"), format!("{}:5", file.path().display()));
    assert_eq!(origin("tiers.g1"), "default");
    assert_eq!(origin("router.policy"), "--set router.policy=round-robin");
}

#[test]
fn an_invalid_value_is_named_with_key_origin_and_hint() {
    let cases: [(&str, &[&str]); 17] = [
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
        ("tiers=4", &["tiers = 4"]),
        ("engine.max_prefill_chunk_tokens=0", &["engine.max_prefill_chunk_tokens = 0", "between 1 and"]),
        ("threads=0", &["threads = 0", "auto"]),
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
    ];
    for (assignment, wanted) in cases {
        let error = error_of(&Sources { environment: environment(&[]), flags: vec![set(assignment)], file: None });
        assert!(error.contains(wanted), "`{wanted}` is not in: {error}");
    }
}

#[test]
fn g3_paths_are_set_by_file_environment_or_flag() {
    let one = |path: &str, capacity| DiskPath { path: path.into(), capacity };
    let wanted = vec![one("/mnt/a", Budget::Bytes(ByteSize(400 << 30))), one("/mnt/b", Budget::Auto)];
    let value = r#"[{path="/mnt/a", capacity="400GiB"}, {path="/mnt/b"}]"#;
    let file = file(&format!("[tiers]\ng3_paths = {}\n", value.replace('=', " = ")));
    let from_file = Sources { file: Some(file.path().into()), environment: environment(&[]), flags: vec![] };
    let pairs = environment(&[("BLOCKYARD_TIERS__G3_PATHS", value)]);
    let from_environment = Sources { environment: pairs, ..Sources::default() };
    let flags = vec![set(&format!("tiers.g3_paths={value}"))];
    let from_flag = Sources { environment: environment(&[]), flags, ..Sources::default() };
    for sources in [from_file, from_environment, from_flag] {
        let (config, origins) = load(&sources).unwrap();
        assert_eq!(config.tiers.g3_paths, wanted);
        let printed = self::file(&as_toml(&config, &origins));
        let again = Sources { file: Some(printed.path().into()), environment: vec![], flags: vec![] };
        assert_eq!(load(&again).unwrap().0, config, "what is printed can be read");
    }
    let wrong = set(r#"tiers.g3_paths=[{path="/mnt/a", capacity="lots"}]"#);
    let error = error_of(&Sources { environment: environment(&[]), flags: vec![wrong], file: None });
    assert!(error.contains("tiers.g3_paths") && error.contains("4GiB"), "{error}");
}

#[test]
fn quotas_are_read_printed_and_read_again() {
    let file = file(
        "[[tiers.quotas]]\ntenant = 'a.b \"c\"'\ng1_guaranteed = '1GiB'\ng2_limit = '2GiB'\n\
         [[tiers.quotas]]\ntenant = 'd'\n",
    );
    let sources = Sources { file: Some(file.path().into()), environment: environment(&[]), flags: vec![] };
    let (config, origins) = load(&sources).unwrap();
    let first = TenantQuota {
        g1_guaranteed: ByteSize(1 << 30),
        g2_limit: Some(ByteSize(2 << 30)),
        ..TenantQuota::of("a.b \"c\"")
    };
    assert_eq!(config.tiers.quotas, [first, TenantQuota::of("d")]);
    let printed = self::file(&as_toml(&config, &origins));
    let again = Sources { file: Some(printed.path().into()), environment: vec![], flags: vec![] };
    assert_eq!(load(&again).unwrap().0, config, "what is printed can be read");
    let wrong = set(r#"tiers.quotas=[{tenant="a", g5_limit="1GiB"}]"#);
    let error = error_of(&Sources { environment: environment(&[]), flags: vec![wrong], file: None });
    assert!(error.contains("tiers.quotas") && error.contains("g5"), "{error}");
}

#[test]
fn an_unknown_key_is_named_with_origin_and_suggestion() {
    let from_env = Sources { environment: environment(&[("BLOCKYARD_ROUTER__POLCY", "kv")]), ..Sources::default() };
    let error = error_of(&from_env);
    assert!(error.contains("`router.polcy` (environment BLOCKYARD_ROUTER__POLCY)"), "{error}");
    assert!(error.contains("did you mean `router.policy`?"), "{error}");
    for (assignment, meant) in [("policy=kv", Some("router.policy")), ("modl=x", Some("model")), ("colour=red", None)] {
        let error = error_of(&Sources { environment: environment(&[]), flags: vec![set(assignment)], file: None });
        assert_eq!(error.contains("did you mean"), meant.is_some(), "{error}");
        assert!(meant.is_none_or(|meant| error.contains(&format!("`{meant}`"))), "{error}");
    }
}

#[test]
fn a_file_that_is_missing_or_broken_is_named() {
    let missing = Sources { file: Some("no/such.toml".into()), environment: environment(&[]), flags: vec![] };
    assert!(error_of(&missing).contains("no/such.toml"));
    let broken = file("listen = \n");
    let error = error_of(&Sources { file: Some(broken.path().into()), environment: environment(&[]), flags: vec![] });
    assert!(error.contains(&broken.path().display().to_string()) && error.contains("line 1"), "{error}");
}

#[test]
fn variables_set_by_kubernetes_are_ignored() {
    let names = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR"];
    let pairs: Vec<_> = names.iter().map(|name| format!("BLOCKYARD_{name}")).collect();
    let pairs: Vec<_> = pairs.iter().map(|name| (name.as_str(), "tcp://10.0.0.1:8000")).collect();
    assert!(load(&Sources { environment: environment(&pairs), ..Sources::default() }).is_ok());
}

#[test]
fn credentials_come_from_the_environment_and_stay_hidden() {
    let secret = "wJalrXUtnFEMI";
    let pairs =
        [("AWS_ACCESS_KEY_ID", "AKIA"), ("AWS_SECRET_ACCESS_KEY", secret), ("AZURE_STORAGE_ACCOUNT_KEY", secret)];
    let sources = Sources {
        environment: environment(&pairs),
        flags: vec![
            Flag::own("--g4", "tiers.g4.url", "s3://bucket/kv"),
            set("tiers.g4.endpoint=http://127.0.0.1:9000"),
        ],
        file: None,
    };
    let (config, origins) = load(&sources).unwrap();
    assert_ne!(config.credentials, Credentials::default());
    for shown in [as_toml(&config, &origins), as_json(&config, &origins).to_string(), format!("{config:?}")] {
        assert!(shown.contains("bucket") && !shown.contains(secret), "{shown}");
    }
}

#[test]
fn without_home_a_data_dir_is_required() {
    let error = error_of(&Sources::default());
    assert!(error.contains("--data-dir"), "{error}");
    let said = Sources { flags: vec![Flag::own("--data-dir", "data_dir", "123")], ..Sources::default() };
    assert_eq!(load(&said).unwrap().0.data_dir, PathBuf::from("123"));
    let xdg = Sources { environment: vec![("XDG_CACHE_HOME".into(), "/cache".into())], ..Sources::default() };
    assert_eq!(load(&xdg).unwrap().0.data_dir, PathBuf::from("/cache/blockyard"));
}

#[test]
fn printed_configuration_loads_to_the_same_values() {
    let sources = Sources {
        environment: environment(&[]),
        flags: vec![set("tiers.g1=3MiB"), set("router.seed=7"), Flag::own("--model", "model", "folder of \"mine\"")],
        file: None,
    };
    let (config, origins) = load(&sources).unwrap();
    let printed = as_toml(&config, &origins);
    assert!(printed.contains("# --set router.seed=7") && printed.contains("# unset"), "{printed}");
    let file = file(&printed);
    let again = Sources { file: Some(file.path().into()), environment: vec![], flags: vec![] };
    assert_eq!(load(&again).unwrap().0, config);
    assert_eq!(
        as_json(&config, &origins)["tiers.g1"],
        serde_json::json!({"value": "3MiB", "origin": "--set tiers.g1=3MiB"})
    );
}

#[test]
fn upstreams_are_urls_or_tables_and_printed_as_tables() {
    let load_file = |text: &str| {
        let file = file(text);
        load(&Sources { file: Some(file.path().into()), environment: environment(&[]), flags: vec![] })
    };
    let of_url = load_file("upstreams = ['http://10.0.0.1:8000']\n").unwrap().0.upstreams;
    assert_eq!(of_url, [Upstream::new("http://10.0.0.1:8000".parse().unwrap())]);
    for url in ["http://10.0.0.1:8000/a", "http://ann:secret@10.0.0.1:8000/a", "http://ann@10.0.0.1:8000/a"] {
        assert_eq!(Upstream::new(url.parse().unwrap()).shown_url(), "http://10.0.0.1:8000/a");
    }
    let table = "[[upstreams]]\nurl = 'http://10.0.0.1:8000'\nresolve = 'one'\ncache_salt = 'on'\nhttp = 'h2c'\n\
        kv_events = 'tcp://*:5557'\nkv_events_replay = 'tcp://10.0.0.9:5558'\nblock_size = 32\nrole = 'pooling'\n";
    let (config, origins) = load_file(table).unwrap();
    let endpoint = |text: &str| text.parse().unwrap();
    let kv_events =
        KvEvents::At { live: endpoint("tcp://10.0.0.1:5557"), replay: Some(endpoint("tcp://10.0.0.9:5558")) };
    let expected = Upstream {
        resolve: Resolve::One,
        cache_salt: CacheSalt::On,
        http: HttpVersion::H2c,
        kv_events,
        block_size: NonZero::new(32),
        role: UpstreamRole::Pooling,
        ..of_url[0].clone()
    };
    assert_eq!(config.upstreams, [expected]);
    assert_eq!(load_file(&as_toml(&config, &origins)).unwrap().0.upstreams, config.upstreams);
    let (config, origins) = load_file("[[upstreams]]\nurl = 'https://a'\nca_file = '/srv/ca.pem'\n").unwrap();
    assert_eq!(config.upstreams[0].ca_file, Some("/srv/ca.pem".into()));
    assert_eq!(load_file(&as_toml(&config, &origins)).unwrap().0.upstreams, config.upstreams);
    let auto = load_file("[[upstreams]]\nurl = 'http://a'\nkv_events = 'auto'\n").unwrap().0;
    assert_eq!(auto.upstreams[0].kv_events, KvEvents::Auto);
    let (config, origins) = load_file("upstreams = ['http://a']\n[tokenizers]\n'org/m.1' = '/srv/m'\n").unwrap();
    assert_eq!(config.tokenizers, BTreeMap::from([("org/m.1".to_owned(), "/srv/m".into())]));
    assert_eq!(load_file(&as_toml(&config, &origins)).unwrap().0.tokenizers, config.tokenizers);
    for (wrong, named) in [
        ("kv_events = 'ipc:///tmp/kv'", "kv_events: endpoint \"ipc:///tmp/kv\""),
        ("kv_events_replay = 'tcp://*:5558'", "kv_events_replay needs"),
        ("block_size = 0", "block_size"),
        ("role = 'decode'", "role: `decode` is not supported yet: KV blocks are not handed over between servers"),
        ("role = 'embed'", "role: `embed`; expected `auto`, `both`, `generate` or `pooling`"),
        ("[[upstreams]]\nurl = 'http://a'", "upstreams.1.url"),
        ("[[upstreams]]\nurl = 'https://b'\nhttp = 'h2c'", "HTTP/2 without TLS"),
        ("ca_file = 'ca.pem'", "ca_file: only a server with https://"),
    ] {
        let error = load_file(&format!("[[upstreams]]\nurl = 'http://a'\n{wrong}\n")).err().unwrap();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn an_alias_is_a_name_or_a_list_of_deployments() {
    let load_file = |text: &str| {
        let file = file(&format!("upstreams = ['http://a']\n[aliases]\n{text}\n"));
        let sources = Sources { file: Some(file.path().into()), environment: environment(&[]), flags: vec![] };
        let loaded = load(&sources)?;
        Ok::<_, String>((loaded.0.aliases.clone(), as_toml(&loaded.0, &loaded.1)))
    };
    let deployment = |model: &str, weight| Deployment { model: model.into(), weight };
    let (aliases, printed) =
        load_file("'gpt-4.1' = 'org/m'\nchat = [{ model = 'a', weight = 9 }, { model = 'b' }]").unwrap();
    assert_eq!(aliases["gpt-4.1"].deployments, [deployment("org/m", 1)]);
    assert_eq!(aliases["chat"].deployments, [deployment("a", 9), deployment("b", 1)]);
    let again = file(&printed);
    let again = Sources { file: Some(again.path().into()), environment: environment(&[]), flags: vec![] };
    assert_eq!(load(&again).unwrap().0.aliases, aliases);
    for wrong in ["chat = []", "chat = [{ model = 'a', weight = 0 }]", "chat = ''", "chat = [{ name = 'a' }]"] {
        let error = load_file(wrong).unwrap_err();
        assert!(error.contains("aliases.chat"), "{wrong}: {error}");
    }
}

#[test]
fn a_composed_policy_is_set_printed_and_read_again() {
    let composed =
        "router.policy={filter=[fits,{queue_below=500ms}],score=[{term=overlap,weight=2},{term=queue}],pick=weighted}";
    let said = |assignment| Sources { environment: environment(&[]), flags: vec![set(assignment)], file: None };
    let (config, origins) = load(&said(composed)).unwrap();
    let file = file(&as_toml(&config, &origins));
    let again = Sources { file: Some(file.path().into()), environment: vec![], flags: vec![] };
    assert_eq!(load(&again).unwrap().0, config);
    for (assignment, known) in [
        ("router.policy={score=[{term=speed}]}", "`overlap`"),
        ("router.policy={score=[{term=queue}],pick=first}", "`weighted`"),
        ("router.policy={filter=[healthy],score=[{term=queue}]}", "`fits`"),
        ("router.policy={score=[]}", "router.policy.score"),
        ("router.models.small.policy=robin", "`round-robin`"),
    ] {
        let error = error_of(&said(assignment));
        assert!(error.contains(known) && error.contains("router."), "{error}");
    }
}

#[test]
fn a_model_name_may_contain_a_dot() {
    let said = |bias: &str| file(&format!("[router.models.\"llama-3.1\"]\ndecode_interference_weight = {bias}\n"));
    let read = |from: &tempfile::NamedTempFile| Sources {
        environment: environment(&[]),
        flags: Vec::new(),
        file: Some(from.path().into()),
    };
    let right = said("0.5");
    let (config, origins) = load(&read(&right)).unwrap();
    assert_eq!(
        origins.of("router.models.llama-3.1.decode_interference_weight"),
        format!("{}:2", right.path().display())
    );
    let printed = as_toml(&config, &origins);
    assert!(printed.contains("[router.models.\"llama-3.1\"]"), "{printed}");
    assert_eq!(load(&read(&file(&printed))).unwrap().0, config);
    let error = error_of(&read(&said("-1")));
    assert!(error.contains("router.models.llama-3.1.decode_interference_weight = -1 ("), "{error}");
}

/// The error of `serve` for a configuration file.
fn refused_to_serve(text: &str) -> String {
    let file = file(text);
    let sources = Sources { file: Some(file.path().into()), environment: environment(&[]), flags: vec![] };
    let errors = Config::load_to_serve(&sources).err().expect("the configuration is wrong").to_string();
    errors.replace(&file.path().display().to_string(), "FILE")
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

/// Numeric keys that may be zero, and why.
const MAY_BE_ZERO: [&str; 8] = [
    "frontend.shutdown_delay",            // closes at once
    "shutdown_timeout",                   // ends at once
    "router.decode_interference_weight",  // looks at the first token only
    "router.seed",                        // any number is a seed
    "router.admission.max_queued_tokens", // nothing waits
    "router.admission.max_queue_time",    // nothing waits
    "listen",                             // port 0: the system chooses
    "tracing.sample_ratio",               // records only what clients ask for
];

#[test]
fn numeric_keys_refuse_values_out_of_range() {
    let refuses = |key: &str, value: &str| {
        let (table, name) = key.rsplit_once('.').map_or((String::new(), key), |(t, name)| (format!("[{t}]\n"), name));
        let file = file(&format!("{table}{name} = {value}\n"));
        let sources = Sources { file: Some(file.path().into()), environment: environment(&[]), flags: vec![] };
        Config::load_to_serve(&sources).is_err()
    };
    let mut checked = 0;
    for (key, default) in defaults() {
        let Some(default) = default else { continue };
        let text = default.trim_matches('"');
        let unit = if text.parse::<f64>().is_ok() {
            ""
        } else if text.parse::<HumanDuration>().is_ok() {
            "s"
        } else if text.parse::<ByteSize>().is_ok() {
            "GiB"
        } else {
            continue;
        };
        let quoted = |number: &str| if unit.is_empty() { number.to_owned() } else { format!("'{number}{unit}'") };
        for number in ["-1", "nan", "inf", "-inf", "1e300"] {
            assert!(refuses(&key, &quoted(number)), "{key} = {}", quoted(number));
        }
        let zero = if default.contains('.') && unit.is_empty() { "0.0" } else { "0" };
        assert_eq!(refuses(&key, &quoted(zero)), !MAY_BE_ZERO.contains(&key.as_str()), "{key} = {}", quoted(zero));
        checked += 1;
    }
    assert!(checked >= 24, "only {checked} keys were found to be numeric");
}

#[test]
fn optional_numbers_refuse_zero_and_absurd_values() {
    for text in [
        "[tiers.g4]\ncapacity = '0'",
        "[tiers.g4]\nmax_age = '0s'",
        "[tiers]\ng2 = -1",
        "[tiers]\ng3 = 1e300",
        "[tiers]\ng2 = nan",
        "[tiers]\ng3_5 = { path = '/mnt', capacity = '0' }",
        "[tiers]\ng3_5 = { path = '/mnt', capacity = '1GiB', max_age = '0s' }",
        "[tiers]\nquotas = [{ tenant = 'a', weight = 0.0 }]",
        "[tiers]\nquotas = [{ tenant = 'a', weight = 1e300 }]",
        "[router]\npolicy = { score = [{ term = 'queue', weight = nan }] }",
        "[router]\npolicy = { filter = [{ queue_below = '0s' }], score = [{ term = 'queue' }] }",
        "[router.admission.tenants.\"*\"]\nmax_inflight_tokens = 0",
        "[router.admission.tenants.\"*\"]\nweight = nan",
        "[router.models.small]\ndecode_interference_weight = 1e300",
        "threads = 100000000",
    ] {
        let _ = refused_to_serve(text);
    }
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
        assert_eq!(super::check_log_filter(filter), Ok(()), "{filter}");
    }
}

#[test]
fn keys_of_the_native_engine_have_no_effect_with_upstreams() {
    let without_effect = |upstreams: &[&str]| {
        let flags = [Flag::own("--model", "model", "tiny"), set("tiers.g4=/mnt/kv"), set("router.seed=1")];
        let flags = flags.into_iter().chain(upstreams.iter().map(|assignment| set(assignment))).collect();
        let (config, origins) = load(&Sources { environment: environment(&[]), flags, file: None }).unwrap();
        config.without_effect(&origins).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(without_effect(&["upstreams=[\"http://a\"]"]), ["model", "tiers.g4.url"]);
    assert_eq!(without_effect(&[]), Vec::<String>::new());
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
