//! Values that are read, printed and read again.

use super::*;

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
        let printed = super::file(&as_toml(&config, &origins));
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
    let printed = super::file(&as_toml(&config, &origins));
    let again = Sources { file: Some(printed.path().into()), environment: vec![], flags: vec![] };
    assert_eq!(load(&again).unwrap().0, config, "what is printed can be read");
    let wrong = set(r#"tiers.quotas=[{tenant="a", g5_limit="1GiB"}]"#);
    let error = error_of(&Sources { environment: environment(&[]), flags: vec![wrong], file: None });
    assert!(error.contains("tiers.quotas") && error.contains("g5"), "{error}");
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
