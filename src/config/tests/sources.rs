//! Where values come from: defaults, file, environment, flags.

use super::*;

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
fn a_flag_and_set_for_one_key_are_refused() {
    let loaded = |own: Flag, assignment: &str| {
        load(&Sources { environment: environment(&[]), flags: vec![set(assignment), own], file: None })
    };
    let upstream = || Flag::list("--upstream", "upstreams", &["http://b:8000".to_owned()]);
    let g4 = || Flag::own("--g4", "tiers.g4.url", "s3://bucket/kv");
    for (own, assignment, key) in [
        (upstream(), "upstreams=[\"http://a:8000\"]", "upstreams: `--upstream` and `--set` both set it"),
        (upstream(), "upstreams.0.url=http://a:8000", "upstreams: `--upstream` and `--set` both set it"),
        (Flag::own("--listen", "listen", "1"), "listen=1", "listen: `--listen` and `--set` both"),
        (Flag::own("--role", "workers", "both:1"), "workers=decode:2", "workers: `--role` and `--set` both"),
        (Flag::list("--nats", "nats.servers", &[]), "nats.servers=nats://a", "nats.servers: `--nats` and"),
        (Flag::list("--nats", "nats.servers", &[]), "nats={servers=[nats://a]}", "nats.servers: `--nats` and"),
        (g4(), "tiers.g4=/mnt/kv", "tiers.g4.url: `--g4` and `--set`"),
        (g4(), "tiers.g4.url=/mnt/kv", "tiers.g4.url: `--g4` and `--set`"),
    ] {
        let error = loaded(own, assignment).err().unwrap_or_default();
        assert!(error.contains(key), "{assignment}: {error}");
    }
    assert!(loaded(g4(), "tiers.g4.endpoint=http://127.0.0.1:9000").is_ok(), "another key of the section");
    assert!(loaded(Flag::own("--listen", "listen", "1"), "admin.listen=2").is_ok());
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
