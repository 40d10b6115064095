// Keeps a page up to date. Without it the page works, and has to be reloaded.
"use strict";
(() => {
	const main = document.querySelector("main[data-stream]");
	const told = document.getElementById("live");
	const pause = document.getElementById("pause");
	if (!main || !told || !window.EventSource) return;

	let source = null;
	let paused = false;

	const tell = (text, state) => {
		if (told.textContent !== text) told.textContent = text;
		told.className = state;
	};

	// update puts the parts of a message in the place of those of before. What has the focus keeps it.
	const update = (html) => {
		const parts = new DOMParser().parseFromString(html, "text/html");
		for (const part of parts.querySelectorAll("[data-live]")) {
			const before = document.getElementById(part.id);
			if (!before || !before.hasAttribute("data-live") || before.innerHTML === part.innerHTML) continue;
			const focused = before.contains(document.activeElement) ? document.activeElement : null;
			const scrolled = [...before.querySelectorAll(".wide")].map((wide) => wide.scrollLeft);
			before.replaceWith(document.adoptNode(part));
			part.querySelectorAll(".wide").forEach((wide, i) => { wide.scrollLeft = scrolled[i] || 0; });
			if (focused) same(part, focused)?.focus({ preventScroll: true });
		}
	};

	// same finds the element that stands for one that was replaced.
	const same = (part, element) => {
		const href = element.getAttribute("href");
		const alike = href ? [...part.querySelectorAll("a")].find((a) => a.getAttribute("href") === href)
			: [...part.querySelectorAll(element.tagName)].find((e) => e.className === element.className);
		return alike || part.querySelector("[tabindex], a");
	};

	// Plots are drawn anew once in a while: they change slowly.
	const drawAgain = () => {
		for (const img of document.querySelectorAll("img[data-plot]")) {
			const at = "&at=" + Date.now();
			const fresh = (address) => address.replace(/&at=\d+$/, "") + at;
			for (const s of img.parentElement.querySelectorAll("source")) s.srcset = fresh(s.getAttribute("srcset"));
			img.src = fresh(img.getAttribute("src"));
		}
	};

	const open = () => {
		if (source || paused || document.hidden) return;
		source = new EventSource(main.dataset.stream);
		source.onopen = () => tell("Live", "on");
		source.onmessage = (message) => { tell("Live", "on"); update(message.data); };
		source.addEventListener("stale", () => tell("The database does not answer: this may be old.", "off"));
		source.onerror = () => {
			const given = source.readyState === EventSource.CLOSED;
			tell(given ? "Not live. Reload to see what is new." : "Connecting again …", "off");
			if (given) close();
		};
	};
	const close = () => { source?.close(); source = null; };

	pause.hidden = false;
	pause.addEventListener("click", () => {
		paused = !paused;
		pause.textContent = paused ? "Go on" : "Pause";
		if (paused) { close(); tell("Paused", ""); } else { open(); }
	});
	document.addEventListener("visibilitychange", () => { document.hidden ? close() : open(); });
	window.addEventListener("pagehide", close);
	setInterval(() => { if (source && source.readyState === EventSource.OPEN) drawAgain(); }, 15000);
	open();
})();
