"""``policy_kwargs`` as Python expressions: legal ones and rubbish."""

# Unless another one is drawn
NETWORK = ("[4]", "[4, 4]", "[]", "dict(pi=[4], vf=[4, 3])", "dict(pi=[], vf=[4])", "dict(pi=[4])", "[np.int64(4)]", "(4,)")
LEGAL = {
    "net_arch": NETWORK,
    "activation_fn": ("nn.Tanh", "nn.ReLU", "nn.GELU", "nn.ELU", "nn.SiLU", "nn.LeakyReLU", "nn.Identity", "nn.Softplus"),
    "ortho_init": ("True", "False"),
    "log_std_init": ("-2.0", "0.5", "0", "-3", "np.float32(-1)", "1"),
    "share_features_extractor": ("False", "True"),
    "normalize_images": ("True", "False"),
    "optimizer_class": ("th.optim.SGD", "th.optim.Adam", "th.optim.AdamW", "th.optim.RMSprop", "th.optim.NAdam"),
    "optimizer_kwargs": (
        "dict(weight_decay=0.01)",
        "dict(eps=1e-7)",
        "dict(betas=(0.8, 0.9))",
        "dict(eps=np.float64(1e-6))",
        "{}",
    ),
    "net_type": ("'mlp'", "'layer_norm'", "'simba', 'net_arch': dict(pi=[4, 4], vf=[8])"),
    "mean_tanh": ("True", "False"),
    "learn_std": ("False", "True"),
}
OF_SDE = {"full_std": ("False", "True"), "use_expln": ("True",), "squash_output": ("True",), "log_std_init": ("-2.0",)}
OF_TRANSFORMER = {
    "context_length": ("1", "2", "5", "9", "np.int64(3)"),
    "d_model": ("4", "8"),
    "n_heads": ("1", "2"),
    "n_layers": ("1", "2", "3"),
    "ffn_dim": ("4", "8", "None"),
    "n_stacked": ("1", "3", "20"),
    "gate": ("True", "False"),
    "use_last_action": ("True",),
    "use_last_reward": ("True",),
}
OF_DICTIONARIES = {"actor_keys": ("['a']", "['b']", "('b', 'a')", "None"), "critic_keys": ("['b']", "['a', 'b']", "None")}
_TRANSFORMER = "TransformerExtractor, 'features_extractor_kwargs': dict(d_model=4, n_heads=2, n_frames=1)"
EXTRACTORS = {
    "vector": ("FlattenExtractor", _TRANSFORMER),
    "image": ("NatureCNN, 'features_extractor_kwargs': dict(features_dim=8)", "FlattenExtractor"),
    "dict": ("CombinedExtractor, 'features_extractor_kwargs': dict(cnn_output_dim=4)",),
}
_JUNK = (
    "None",
    "'x'",
    "5",
    "-1",
    "0",
    "[]",
    "{}",
    "object()",
    "2.5",
    "float('nan')",
    "True",
    "10**400",
    "[[4]]",
    "int",
    "nn.Tanh()",
)
OF_LSTM = {
    "n_lstm_layers": ("1", "2"),
    "shared_lstm": ("False", "True"),
    "enable_critic_lstm": ("True", "False"),
    "lstm_kwargs": ("None", "{}", "dict(bias=False)"),
    "rnn": ("'lstm'", "'gru'", "'mingru'", "'lru'"),
}
RUBBISH = {
    "net_type": ("None", "'resnet'", "5", "['simba']", "'simba', 'net_arch': [4, 3]"),
    "net_arch": ("[0]", "[-1]", "['x']", "5", "'x'", "[4.5]", "dict(qf=[4])", "[[4]]", "dict(pi=4)", "{'pi': None}", "[True]"),
    "activation_fn": ("th.tanh", "'tanh'", "nn.Tanh()", "None", "nn.Linear", "nn.PReLU", "lambda: nn.Tanh()", "int", "nn.GLU"),
    "log_std_init": (
        "float('inf')",
        "float('nan')",
        "-float('inf')",
        "1e10",
        "200",
        "-200",
        "'x'",
        "None",
        "10**400",
        "[0.0]",
    ),
    "optimizer_class": ("'adam'", "5", "None", "th.optim.LBFGS", "nn.Linear", "th.optim.Optimizer", "th.optim.SparseAdam"),
    "optimizer_kwargs": (
        "5",
        "dict(nope=1)",
        "dict(lr=0.1)",
        "dict(eps=float('nan'))",
        "dict(betas=(0.9, 2.0))",
        "dict(eps=-1)",
    ),
    "features_extractor_class": ("5", "None", "nn.Linear", "'x'", "NatureCNN", "CombinedExtractor", "TransformerExtractor"),
    "features_extractor_kwargs": (
        "5",
        "dict(nope=1)",
        "dict(features_dim=0)",
        "dict(features_dim=-1)",
        "None",
        "dict(d_model=3)",
    ),
    "context_length": ("0", "-1", "2.5", "10**400", "'5'", "True", "None"),
    "d_model": ("0", "5", "-4", "7.5", "None", "10**400"),
    "n_heads": ("0", "3", "-1", "None", "100"),
    "ffn_dim": ("0", "-1", "2.5", "10**400", "'x'"),
    "n_layers": ("0", "-1", "None", "0.5"),
    "lstm_hidden_size": ("0", "-1", "2.5", "10**400", "'5'", "True", "None"),
    "n_lstm_layers": ("0", "-1", "None", "0.5"),
    "shared_lstm": ("True", "None", "1", "'x'"),
    "lstm_kwargs": ("5", "dict(bidirectional=True)", "dict(proj_size=1)", "dict(dropout=2)", "dict(bias=None)"),
    "rnn": ("'rnn'", "None", "5", "nn.GRU"),
    "actor_keys": ("[]", "['x']", "'a'", "5", "[['a']]", "{'a'}", "[None]"),
    "critic_keys": ("[]", "['a', 'x']", "'b'", "True", "[0]", "{}"),
    "with_critic": ("False", "True", "None"),
    "observation_space": ("None", "spaces.Discrete(2)"),
    "use_sde": ("True",),
    "nope": ("1",),
}


def memory_of(policy):
    """What a policy remembers with."""
    return next((memory for memory in ("Transformer", "Lstm") if memory in policy), None)


def drawn(rng, memory, has_box, uses_sde, obs_kind):
    """Legal ``policy_kwargs`` for a policy."""
    given = {"net_arch": rng.choice(NETWORK)}
    if memory == "Lstm":
        given |= {"lstm_hidden_size": rng.choice(("1", "4", "np.int64(5)"))}
    if memory == "Transformer":
        given |= {
            "d_model": "8",
            "n_heads": "2",
            "ffn_dim": "8",
            "context_length": rng.choice(OF_TRANSFORMER["context_length"]),
        }
    choices = dict(LEGAL) if has_box else {name: LEGAL[name] for name in LEGAL if name not in ("mean_tanh", "learn_std")}
    if uses_sde:
        choices = {name: choices[name] for name in choices if name not in ("mean_tanh", "learn_std")} | OF_SDE
    choices |= {"Transformer": OF_TRANSFORMER, "Lstm": OF_LSTM}.get(memory, {})
    if obs_kind == "dict":
        choices |= OF_DICTIONARIES
    for name in rng.sample(sorted(choices), rng.choice([0, 0, 1, 2, 3])):
        given[name] = rng.choice(choices[name])
    if given.keys() & OF_DICTIONARIES.keys():
        given = {name: given[name] for name in given if name not in ("share_features_extractor", "shared_lstm")}
    if given.get("shared_lstm") == "True":
        given |= {"enable_critic_lstm": "False", "share_features_extractor": "True"}
    if given.get("squash_output") == "True":
        given["log_std_init"] = "-2.0"
    if obs_kind in EXTRACTORS and (obs_kind == "image" or rng.random() < 0.2):
        given["features_extractor_class"] = rng.choice(EXTRACTORS[obs_kind])
    return given


def with_rubbish(rng, given):
    """The same with a value that is not legal."""
    name = rng.choice(sorted(RUBBISH))
    return {**given, name: rng.choice(RUBBISH[name] if rng.random() < 0.7 else _JUNK)}


def source(given):
    """The dictionary as an expression."""
    return "{" + ", ".join(f"{name!r}: {value}" for name, value in given.items()) + "}"
