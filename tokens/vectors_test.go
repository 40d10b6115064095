package tokens_test

var goldenVectors = []struct{ prefix, secret, text, digest string }{
	{
		"metered",
		"755857880e120d9459f8a967958f4bf832e02acdb94518de504f35c6443d818a",
		"metered_rPdERjWsMjov7NCWjcYhxRAOMqKOiDAM8p97jmGmh3s42O4wF",
		"94ec3e3f7b3d4c57f0a721504bdb2b3e41d45d19c5a5394ae26fdd7ff260da7c",
	},
	{
		"acme_upload",
		"00000000da360ee2266b1c52042a4d8735d594f85d129c90d4ddc1cc5eab4f49",
		"acme_upload_00000b2jrHIcz9U6CURm1RYF2LoRdnTpcfa9qXNafI52jzSl2",
		"91d244ffc00d7a285931b06a8c7c3154665083572d8ac4625ee92eebec83ad33",
	},
	{
		"Z9",
		"ffffffff801d8b5450e12d2a81b26bd0bdab479dbac079fa9717d4ba0e2df9bc",
		"Z9_YHJSKQa77uiGooKf4dW97Lw3U8SU8ftjklHiXiIQzHC3BNhN4",
		"d679a1e487211e676a4e835c99bddb6ccc8dd20e7384b23444cb11bccd877bca",
	},
}

var deriveVectors = []struct {
	parts  []string
	secret string
}{
	{[]string{"acme", "op-1"}, "a755646529a6f562eaa0b93b4fdd893acc725f002a9048b12c1284dcfabf1e4f"},
	{[]string{"acmeop", "-1"}, "d03f6c4b17962dc32d31a2e6542e3a76fe1c905d3a52b95cff3e1a8f17e4a18a"},
	{[]string{""}, "a07a41d316888294cbeabe526193bca6f537c91afa311df9a54805d8adde0372"},
	{[]string{"", "ä"}, "b73a2d023e307636ce0cb092c367a92e3220c983789af81cef8ff7475bc6731e"},
}
