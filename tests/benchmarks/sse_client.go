// A load generator of its own: closed-loop clients that stream completions, to check what other clients measure.
//
//	sse_client URL FILE CLIENTS TOKENS
//
// FILE has JSON lines with `prompt`. Prints one JSON object: tokens per second, median time to first event and between
// events in milliseconds, failed requests, and the processor seconds of this process.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"sort"
	"strconv"
	"sync"
	"syscall"
	"time"
)

type sample struct {
	first  time.Duration
	gaps   []time.Duration
	events int
	err    error
}

func stream(client *http.Client, url, prompt string, tokens int) sample {
	body, _ := json.Marshal(map[string]any{
		"model": "", "prompt": prompt, "max_tokens": tokens, "stream": true, "ignore_eos": true, "temperature": 0,
	})
	var seen sample
	began := time.Now()
	answer, err := client.Post(url+"/v1/completions", "application/json", bytes.NewReader(body))
	if err != nil {
		return sample{err: err}
	}
	defer answer.Body.Close()
	if answer.StatusCode != 200 {
		return sample{err: fmt.Errorf("status %d", answer.StatusCode)}
	}
	last := began
	lines := bufio.NewScanner(answer.Body)
	lines.Buffer(make([]byte, 1<<16), 1<<20)
	for lines.Scan() {
		line := lines.Bytes()
		if !bytes.HasPrefix(line, []byte("data: {")) || bytes.Contains(line, []byte(`"choices":[]`)) {
			continue
		}
		now := time.Now()
		if seen.events == 0 {
			seen.first = now.Sub(began)
		} else {
			seen.gaps = append(seen.gaps, now.Sub(last))
		}
		last = now
		seen.events++
	}
	seen.err = lines.Err()
	return seen
}

func median(values []time.Duration) float64 {
	if len(values) == 0 {
		return 0
	}
	sort.Slice(values, func(a, b int) bool { return values[a] < values[b] })
	return float64(values[len(values)/2].Nanoseconds()) / 1e6
}

func main() {
	url, file := os.Args[1], os.Args[2]
	clients, _ := strconv.Atoi(os.Args[3])
	tokens, _ := strconv.Atoi(os.Args[4])
	text, err := os.ReadFile(file)
	if err != nil {
		panic(err)
	}
	var prompts []string
	for _, line := range bytes.Split(bytes.TrimSpace(text), []byte("\n")) {
		var row struct{ Prompt string }
		if err := json.Unmarshal(line, &row); err != nil {
			panic(err)
		}
		prompts = append(prompts, row.Prompt)
	}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: clients, DisableCompression: true}}
	waiting := make(chan string, len(prompts))
	for _, prompt := range prompts {
		waiting <- prompt
	}
	close(waiting)
	var all []sample
	var guard sync.Mutex
	var running sync.WaitGroup
	began := time.Now()
	for range clients {
		running.Add(1)
		go func() {
			defer running.Done()
			for prompt := range waiting {
				seen := stream(client, url, prompt, tokens)
				guard.Lock()
				all = append(all, seen)
				guard.Unlock()
			}
		}()
	}
	running.Wait()
	seconds := time.Since(began).Seconds()
	var firsts, gaps []time.Duration
	failed := 0
	for _, each := range all {
		if each.err != nil || each.events == 0 {
			failed++
			continue
		}
		firsts, gaps = append(firsts, each.first), append(gaps, each.gaps...)
	}
	var usage syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	cpu := float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
	out, _ := json.Marshal(map[string]any{
		"tokens_per_second": float64(tokens*len(firsts)) / seconds, "ttft_ms": median(firsts), "itl_ms": median(gaps),
		"failed": failed, "client_cpu_s": cpu,
	})
	fmt.Println(string(out))
}
